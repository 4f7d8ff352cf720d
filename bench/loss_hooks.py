"""Losses of `ranks` processes over gloo: with PyTorch's own hooks, which take an object that only
DDP makes, and of shards, whose collectives FSDP2 starts."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.optim.lr_scheduler import LinearLR

import hipress
from bench.loss_cells import SHARDED
from bench.loss_ranks import Curve, evaluate, train
from bench.loss_workloads import ALL, Workload
from hipress.tools.run import methods
from hipress.tools.run.figures import FINAL
from hipress.tools.run.synchronize import synchronize

#: that a rank waits for another
TIMEOUT = timedelta(minutes=5)


def curve(workload: str, method: str, seed: int, steps: int, ranks: int) -> Curve:
    """Train with a method of `hipress demo`, or SHARDED. Raises the first failed rank's error."""
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
    if method.startswith(SHARDED):
        found = _sharded(chosen, method.removeprefix(SHARDED), seed, steps, rank)
        torch.save(found, _result(folder, rank))
        dist.destroy_process_group()
        return
    synchronized = synchronize(chosen.build(seed), methods.parse(method), chosen.training)
    found = train(chosen, _by_ddp, synchronized.module, seed, steps, [rank])
    found.sent = synchronized.sent(steps)
    torch.save(found, _result(folder, rank))
    dist.destroy_process_group()


def _sharded(workload: Workload, method: str, seed: int, steps: int, rank: int) -> Curve:
    """Train a model of FSDP2. method: compressors of gradients and weights, joined by +."""
    model, found = workload.build(seed), Curve()
    for part in (*getattr(model, "layers", ()), model):
        fully_shard(part)
    gradients, weights = method.split("+")
    hipress.shard(model, reduce_scatter=gradients, all_gather=weights)
    optimizer = workload.training.make(model.parameters())
    schedule = LinearLR(optimizer, 1.0, 0.0 if workload.decays else 1.0, steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*workload.batch(seed, rank, step))
        loss.backward()
        if math.isfinite(workload.training.clip):
            nn.utils.clip_grad_norm_(model.parameters(), workload.training.clip)
        optimizer.step()
        schedule.step()
        found.losses.append(loss.item())
    found.sent = hipress.report(model).bytes_sent
    held_out, last = workload.held_out, statistics.fmean(found.losses[-FINAL:])
    found.final = last if held_out is None else evaluate(model, held_out())
    return found


def _by_ddp(gradients: Sequence[Tensor], step: int) -> float:
    """The bytes that the hook counted; it has averaged in the backward pass."""
    return 0.0


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.pt"
