"""Ranks of test_nccl_gpu.py: programs over NCCL, and the same ones on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

import compll
from casync.memory.device import DeviceMemory
from casync.memory.host import HostMemory
from casync.nccl.bindings import connect_by
from casync.nccl.distributed import connector
from casync.runtime.executor import Executor
from casync.runtime.options import Capture, RunOptions
from casync.transports.distributed import DistributedTransport
from casync.transports.nccl import NcclTransport
from hipress import compat
from tests import gpus
from tests.casync.fakes import gradients, graph_of
from tests.patience import HANG

LENGTHS = (1000, 70000, 31)
TOTAL, STEPS = sum(LENGTHS), 5
#: all strategies that run on devices; lengths of threshold vary, which no graph can capture
PROGRAMS = (
    ("ps", "int8_group"), ("ps", "topk"), ("ring", "onebit_group"), ("hierarchical", "int4_group"),
    ("exchange", "onebit_group"), ("exchange", "threshold"), ("allreduce", "powersgd"),
    ("vote", "signum"), ("gtopk", "topk"),
)  # fmt: skip


def averages(rank, size, binding, capture):
    """Averages by each program are the CPU's, bit for bit; other tests compare those of ranks.

    binding: None for the calls of torch's binding, over gloo and on the CPU.
    """
    device = gpus.take(rank) if binding else torch.device("cpu")
    memory = DeviceMemory(device) if binding else HostMemory()
    transport = NcclTransport(
        _connect(rank, size, binding, capture, device), rank, size, memory, HANG,
        stream=None if binding else lambda: 0,
    )  # fmt: skip
    tagged = DistributedTransport.connect(HANG)
    wrong = [
        told
        for strategy, name in PROGRAMS
        if not (capture and name == "threshold")
        for told in _differences(strategy, name, rank, size, transport, memory, tagged, capture)
    ]
    dist.barrier()
    transport.close()
    tagged.close()
    assert not wrong, wrong


def _connect(rank, size, binding, capture, device):
    if binding is None:
        return connector(range(size), HANG, device, backend="gloo")
    store = compat.PrefixStore(f"{binding}/{capture}", compat.job_store())
    return connect_by(binding, rank, range(size), device, store, HANG)


def _differences(strategy, name, rank, size, transport, memory, tagged, capture):
    """Steps over both transports: those with other averages, as text."""
    here = compll.compile(name)
    there = here if memory.host else compll.compile(name, "cuda")
    program = graph_of(LENGTHS, strategy, name, size, codecs={name: here}).slice(rank)
    how = Capture.LAUNCH if capture else Capture.NEVER
    with (
        Executor(transport, {name: there}, RunOptions(timeout=HANG), memory=memory) as device,
        Executor(tagged, {name: here}, RunOptions(timeout=HANG)) as host,
    ):
        states, theirs = _states(name, there), _states(name, here)
        bucket = memory.zeros(TOTAL, torch.float32)
        for step in range(STEPS):
            values = gradients(TOTAL, size, seed=step)[rank]
            bucket.copy_(values)
            device.submit(program, bucket, states, step, capture=how).wait()
            device.settle()
            host.submit(program, values, theirs, step).wait()
            if not torch.equal(bucket.cpu(), values):
                yield f"{strategy}, {name}, step {step}"


def _states(name, codec):
    sides = ("worker", "aggregator") if codec.stateful else ()
    return {(name, side): codec.init_state(TOTAL, len(LENGTHS)) for side in sides}
