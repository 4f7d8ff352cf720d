"""Losses of `ranks` processes over gloo: with PyTorch's own hooks, which take an object that only
DDP makes, of shards, whose collectives FSDP2 starts, and of an outer loop's sites."""

from __future__ import annotations

import os
import statistics
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from bench.loss_cells import SHARDED
from bench.loss_ranks import Curve, train
from bench.loss_workloads import ALL
from hipress.tools.run import methods
from hipress.tools.run.synchronize import synchronize

#: that a rank waits for another
TIMEOUT = timedelta(minutes=5)


def curve(workload: str, method: str, seed: int, steps: int, ranks: int) -> Curve:
    """Train with a method of `hipress bench`, or one that begins with SHARDED. Raises the first
    failed rank's error."""
    with TemporaryDirectory() as folder:
        arguments = (ranks, workload, method, seed, steps, folder)
        start_processes(_rank, arguments, ranks)  # type: ignore[no-untyped-call]
        curves: list[Curve] = [
            torch.load(_result(folder, rank), weights_only=False) for rank in range(ranks)
        ]
    by_step = zip(*(each.losses for each in curves), strict=True)
    final = statistics.fmean(each.final for each in curves)
    return Curve([statistics.fmean(losses) for losses in by_step], curves[0].sent, final)


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
    model = chosen.build(seed)
    if method.startswith(SHARDED):
        method = method.replace("+", ":all_gather=")
    synchronized = synchronize(model, methods.parse(method), chosen.training)
    torch.save(train(chosen, None, synchronized, seed, steps, [rank]), _result(folder, rank))
    dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.pt"
