"""Imports of the server that forks ranks: all that take long and start no thread.

The printer is for kernels that are not cached yet. LLVM initializes when the first kernel is
loaded, so one is; DDP's constructor imports dynamo.
"""

import gc

import networkx
import torch._dynamo
import torch.distributed._composable.replicate_with_fsdp
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.parallel
import torch.optim

import compll
import compll.backends.cpu.kernels
import compll.backends.cuda.backend
import hipress.engine.engine
import hipress.ways.ddp

__all__ = ["compll", "hipress", "networkx", "torch"]

compll.compile("onebit")

# A rank's collection would otherwise write to all objects of the server, and so copy their memory.
gc.collect()
gc.freeze()
