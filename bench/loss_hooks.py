"""Losses with PyTorch's own hooks: a DistributedDataParallel on each of `ranks` processes over
gloo, since a hook takes an object that only DDP makes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from bench.loss_ranks import Curve, train
from bench.loss_workloads import ALL
from hipress.tools.run import methods
from hipress.tools.run.synchronize import synchronize

#: that a rank waits for another
TIMEOUT = timedelta(minutes=5)


def curve(workload: str, method: str, seed: int, steps: int, ranks: int) -> Curve:
    """Train with a method of `hipress demo`; raises the error of the first rank that failed."""
    with TemporaryDirectory() as folder:
        arguments = (ranks, workload, method, seed, steps, folder)
        start_processes(_rank, arguments, ranks)  # type: ignore[no-untyped-call]
        found: list[Curve] = [
            torch.load(_result(folder, rank), weights_only=False) for rank in range(ranks)
        ]
    by_step = zip(*(each.losses for each in found), strict=True)
    final = statistics.fmean(each.final for each in found)
    return Curve([statistics.fmean(losses) for losses in by_step], found[0].sent, final)


def _rank(
    rank: int, ranks: int, workload: str, method: str, seed: int, steps: int, folder: str
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    chosen = ALL[workload]
    synchronized = synchronize(chosen.build(seed), methods.parse(method), chosen.training)
    found = train(chosen, _by_ddp, synchronized.module, seed, steps, [rank])
    found.sent = synchronized.sent(steps)
    torch.save(found, _result(folder, rank))
    dist.destroy_process_group()


def _by_ddp(gradients: Sequence[Tensor], step: int) -> float:
    """The bytes that the hook counted; it has averaged in the backward pass."""
    return 0.0


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.pt"
