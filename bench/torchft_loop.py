"""torchft's own DiLoCo, for comparison: float32, outer SGD with Nesterov's momentum."""

from __future__ import annotations

import importlib
import importlib.util
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from hipress.tools.run.lstm import Training
from hipress.tools.run.synchronize import Synchronized

TORCHFT = "torchft"


def check() -> None:
    """Raise ValueError where torchft is not installed."""
    if importlib.util.find_spec(TORCHFT) is None:
        raise ValueError("torchft is not installed: pip install 'hipress[elastic]'")


def torchft_loop(
    model: nn.Module, options: dict[str, float], training: Training, timeout: timedelta
) -> Synchronized:
    """A model whose weights torchft averages with those of the other sites, each a process of the
    default group, on this machine.

    options: `every` steps, and `lr` and `momentum` of outer SGD. timeout: of all that waits.
    """
    torchft = importlib.import_module(TORCHFT)
    rank, count = dist.get_rank(), dist.get_world_size()
    lighthouse = _lighthouse(count) if rank == 0 else None
    address = [lighthouse and lighthouse.address()]
    dist.broadcast_object_list(address)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None,
        min_replica_size=count, use_async_quorum=False, init_sync=False,  # all begin equal
        replica_id=f"site{rank}", lighthouse_addr=address[0], rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port,
        timeout=timeout, quorum_timeout=timeout, connect_timeout=timeout,
    )  # fmt: skip
    sent, allreduce = [0], manager.allreduce

    def counted(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        sent[0] += 2 * (count - 1) * tensor.nbytes // count
        return allreduce(tensor, *arguments, **keywords)

    manager.allreduce = counted
    manager.kept = lighthouse, store  # live as long
    optimizer = training.make(model.parameters())
    sgd = torch.optim.SGD(
        model.parameters(), lr=options["lr"], momentum=options["momentum"], nesterov=True
    )
    loop = importlib.import_module(f"{TORCHFT}.local_sgd").DiLoCo(
        manager, [model], optimizer, sgd, sync_every=int(options["every"])
    )
    loop.__enter__()  # its hooks see each step of the optimizer
    return Synchronized(model, lambda steps: sent[0], optimizer=optimizer, clips=False)


def _lighthouse(sites: int) -> Any:
    coordination = importlib.import_module(f"{TORCHFT}.coordination")
    return coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=sites)
