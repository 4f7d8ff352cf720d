"""Ranks of test_epochs.py."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress import compat
from tests.hipress.common import data, digest, error_of, make
from tests.hipress.tuner_ranks import quick
from tests.patience import HANG

ERAS = ([0, 1, 2], [0, 2, 3])  # processes of the first group, and of the second
WAYS = ("Synchronizer", "wrap", "attach", "momentum", "Gossip", "all_reduce")


class Training:
    """A training by one way in."""

    def __init__(self, way, model=None):
        self.model, self.way = model or make(), way
        parameters = self.model.parameters()
        self.optimizer = (
            hipress.optim.AdamW(parameters, 0.01, freeze=2)
            if way == "momentum"
            else torch.optim.SGD(parameters, lr=0.01)
        )
        self.sync, self.module = None, self.model
        options = {"timeout": HANG, "min_size": 0}
        if way in ("Synchronizer", "Gossip"):
            self.sync = getattr(hipress, way)(self.model, "int8_group", **options)
        elif way == "attach":
            ddp = DistributedDataParallel(self.model)
            self.sync = self.module = hipress.attach(ddp, "int8_group", **options)
        elif way == "momentum":
            options["optimizer"] = self.optimizer
            self.sync = self.module = hipress.wrap(self.model, "onebit_fine", **options)
        elif way == "wrap":
            self.sync = self.module = hipress.wrap(self.model, "int8_group", **options)

    def step(self, rank, number, batch=None):
        x, y = batch or data(rank, number)
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.module(x), y).backward()
        if self.way == "Synchronizer":
            self.sync.step()
        if self.way == "all_reduce":
            for parameter in self.model.parameters():
                hipress.all_reduce(parameter.grad, "int8_group", timeout=HANG)
        self.optimizer.step()
        if self.way == "Gossip":
            self.sync.step()

    def end(self):
        if self.sync is not None:
            hipress.detach(self.sync)


def regroup(me, _, way):
    """Process 1 is killed in a step; the others and process 3 go on in a new group on the same host
    of a store. The last parameters."""
    store = compat.another_client(compat.job_store())
    dist.barrier()  # destroying the group early would break others' connecting
    dist.destroy_process_group()
    for era, members in enumerate(ERAS):
        if me not in members:
            continue
        rank = members.index(me)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"era {era}", store), rank=rank, world_size=3,
            timeout=timedelta(seconds=HANG),
        )  # fmt: skip
        training = Training(way)

        def steps(training=training, rank=rank):
            for number in range(4):
                if (me, number) == (1, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                training.step(rank, number)

        found = error_of(steps)
        if era == 1:
            return found.kind, found.message, digest(training.model)
        training.end()
        del training, steps
        dist.destroy_process_group()
    return None


def ended_between(rank, world_size, way):
    """Rank 1 is killed after a training; the error of rank 0 as it makes another, and its time."""
    training = Training("wrap")
    training.step(rank, 0)
    store = compat.job_store()
    if rank == 1:
        store.wait(["stepped"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("stepped", "")
    return error_of(lambda: Training(way).step(rank, 0))


def ended_before_a_step(rank, world_size):
    """Rank 2 is killed when "auto" has planned, before its first gradients; the others' errors."""
    quick()
    model = make()
    sync = hipress.Synchronizer(model, "auto", timeout=HANG)
    dist.barrier()
    if rank == 2:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    x, y = data(rank, 0)
    torch.nn.functional.mse_loss(model(x), y).backward()
    return error_of(sync.step)
