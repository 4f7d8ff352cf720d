"""A training by each way in, and what all of them do alike: ranks of test_ways.py."""

from __future__ import annotations

import copy
import gc
import logging
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress import compat
from tests.hipress.common import UNREBUILT, codec, data, digest, error_of, make, raised_by
from tests.hipress.training_ranks import Skipping
from tests.hipress.tuner_ranks import quick
from tests.patience import HANG, SILENCE, wait_until

#: of wrap and attach, of modules that they do not train, and of models of FSDP2
BY_DDP, BESIDE, OF_SHARDS = (
    ("wrap", "attach", "momentum"),
    ("Gossip", "Outer"),
    ("shard", "replicas"),
)
WAYS = ("Synchronizer", *BY_DDP, *OF_SHARDS, *BESIDE, "group", "all_reduce")
CODECS = {"momentum": "onebit_fine", "replicas": "onebit_group"}  # int8_group else
ERAS = ([0, 1, 2], [0, 2, 3])  # processes of the first group, and of the second


class Training:
    """A training by one way in. sync: what hipress.state_dict takes, or None."""

    def __init__(self, way, name="", model=None, timeout=HANG, **options):
        self.model, self.way = model or make(), way
        self.name = codec(name or CODECS.get(way, "int8_group"))
        self.options = {"timeout": timeout, "min_size": 0} | options
        if way in OF_SHARDS:
            shape = (1, dist.get_world_size())[:: -1 if way == "replicas" else 1]
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            fully_shard(self.model, mesh=self.mesh["shard"])
        parameters = self.model.parameters()
        self.optimizer = (
            hipress.optim.AdamW(parameters, 0.01, freeze=2)
            if way == "momentum"
            else torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
        )
        self.sync = self._synchronized()
        self.module = self.sync if way in BY_DDP else self.model

    def _synchronized(self):
        model, name, options = self.model, self.name, self.options
        if self.way == "attach":
            return hipress.attach(DistributedDataParallel(model, **UNREBUILT), name, **options)
        if self.way in BY_DDP:
            more = {"optimizer": self.optimizer} if self.way == "momentum" else {}
            kwargs = options.pop("ddp_kwargs", UNREBUILT)
            return hipress.wrap(model, name, ddp_kwargs=kwargs, **options, **more)
        if self.way == "shard":
            return hipress.shard(model, reduce_scatter=name, **options)
        if self.way == "replicas":
            group, none = self.mesh.get_group("replicate"), dict.fromkeys(HALVES)
            return hipress.shard(model, replicas=name, replica_group=group, **none, **options)
        if self.way == "Outer":
            return hipress.Outer(model, self.optimizer, name, **{"every": 1} | options)
        if self.way == "group":
            return self._group()
        return None if self.way == "all_reduce" else getattr(hipress, self.way)(
            model, name, **options
        )  # fmt: skip

    def _group(self):
        """A group `hipress` that averages gradients as they come."""
        options = hipress.GroupOptions(self.name, **self.options | {"min_size": 1})
        group = dist.new_group(backend="hipress", pg_options=options)

        def averaged(gradient):
            gradient = gradient.clone()
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)
            return gradient

        for parameter in self.model.parameters():
            parameter.register_hook(averaged)
        return group

    def step(self, rank, number, batch=None):
        x, y = batch or data(rank, number)
        self.optimizer.zero_grad()
        mse_loss(self.module(x), y).backward()
        if self.way == "Synchronizer":
            self.sync.step()
        if self.way == "all_reduce":
            for parameter in self.model.parameters():
                hipress.all_reduce(parameter.grad, self.name, timeout=self.options["timeout"])
        self.optimizer.step()
        if self.way in BESIDE:
            self.sync.step()

    def run(self, rank, steps):
        for number in steps:
            self.step(rank, number)

    def end(self):
        if self.way not in ("all_reduce", "group"):
            hipress.detach(self.sync)


HALVES = ("reduce_scatter", "all_gather")


def regroup(me, _, way):
    """Process 1 is killed in a step; the others and process 3 go on in a new group on the same host
    of a store. Errors of the survivors and of their next step; of the second group; and its last
    parameters."""
    store = compat.another_client(compat.job_store())
    dist.destroy_process_group()
    logging.disable(logging.CRITICAL)
    lost = again = None
    for era, members in enumerate(ERAS):
        if me not in members:
            continue
        rank = members.index(me)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"era {era}", store), rank=rank, world_size=3,
            timeout=timedelta(seconds=HANG),
        )  # fmt: skip
        training = Training(way)
        if me == 1:
            training.run(rank, range(2))
            os.kill(os.getpid(), signal.SIGKILL)
        found = error_of(training.run, rank, range(4))
        if era == 1:
            return lost, again, found, digest(training.model)
        lost, again = found, raised_by(training.step, rank, 4)
        training.end()
        del training
        dist.destroy_process_group()
    return None


def silent(rank, world_size, way, options, dtype):
    """The last rank takes no part in the second step, or by DDP in the first; the others' errors,
    and those of their next step."""
    store = compat.job_store()
    # what a Synchronizer leaves out, ranks tell each other at the end of a step
    model = make(unused=way == "Synchronizer") if dtype is None else of_type(dtype)
    training = Training(way, model=model, timeout=SILENCE, **options)
    if way not in BY_DDP:
        training.step(rank, 0)
    if rank == world_size - 1:
        store.wait([f"done/{other}" for other in range(rank)])
        return None
    logging.disable(logging.CRITICAL)
    found = error_of(training.step, rank, 1), raised_by(training.step, rank, 2)
    store.set(f"done/{rank}", "")
    return found


def of_type(dtype):
    """A model whose parameters are of a type."""
    model = make().to(dtype)
    forward = model.forward
    model.forward = lambda x: forward(x.to(dtype)).float()
    return model


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


def ended_before_a_step(rank, world_size, late):
    """Rank 2 is killed when "auto" has planned, before its first gradients; the others' errors.
    late: rank 1 begins its step when that of rank 0 has failed."""
    quick()
    training, store = Training("Synchronizer", "auto"), compat.job_store()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and late:
        store.wait(["failed"])
    error = error_of(training.step, rank, 0)
    if rank == 0:
        store.set("failed", "")
    return error


def uncaught(rank, world_size, way, elsewhere):
    """The last rank's program ends by an exception; the error of the others in the next step, or
    elsewhere, in a collective of torch, with its notes."""
    training = Training(way)
    training.run(rank, range(2))
    dist.barrier()
    if rank == world_size - 1:
        error = ValueError("no such word")
        sys.excepthook(type(error), error, None)
        os._exit(1)
    if not elsewhere:
        return error_of(training.step, rank, 2)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        sys.excepthook(type(error), error, None)
        return error.__notes__


SAVED, LAST = 5, 9  # steps


def resumes(rank, world_size, path, cases):
    """Digests of parameters by case: of a training, and of two that go on from its state, as a file
    or by torch.distributed.checkpoint keeps it."""
    found = {}
    for title, (way, name, options) in cases.items():
        whole, file = Training(way, name, **options), f"{path}/{title}-{rank}.pt"
        whole.run(rank, range(SAVED))
        weights, moments = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict()))
        torch.save(hipress.state_dict(whole.sync), file)
        app = {"hipress": hipress.Stateful(whole.sync, exact=True)} if way != "Gossip" else None
        if app:
            dcp.save(app, checkpoint_id=f"{path}/{title}")
        whole.run(rank, range(SAVED, LAST))
        found[title] = [digest(whole.model)]
        for by_file in (True, False) if app else (True,):
            again = Training(way, name, **options)
            again.model.load_state_dict(weights)
            again.optimizer.load_state_dict(copy.deepcopy(moments))
            if by_file:
                hipress.load_state_dict(again.sync, torch.load(file, weights_only=True))
            else:
                resumed = hipress.Stateful(again.sync, resume=f"{path}/{title}")
                dcp.load({"hipress": resumed}, checkpoint_id=f"{path}/{title}")
            again.run(rank, range(SAVED, LAST))
            found[title].append(digest(again.model))
            again.end()
        whole.end()
    return found


def let_go(rank, world_size, ways):
    """Numbers of hipress's threads as each way trains, and once detached; they end when dropped."""
    found = {}
    gc.disable()  # objects go as they are dropped
    for way in ways:
        options = {"verify": True} if way in ("Synchronizer", *BY_DDP) else {}
        training = Training(way, **options)
        training.run(rank, range(2))
        found[way] = [len(ours())]
        del training
        if way in OF_SHARDS:  # FSDP2's own cycles
            gc.collect()
        wait_until(lambda: not ours())  # a lane may have the last reference
        training = Training(way, **options)
        training.run(rank, range(2))
        training.end()
        found[way].append(len(ours()))
        dist.barrier()
    return found


def ours():
    """Threads of hipress, but for the door, which is the process's."""
    names = [each.name for each in threading.enumerate() if each.name != "hipress-door"]
    return [name for name in names if name.startswith(("casync", "hipress"))]


def now_and_then(rank, world_size, way, name, options):
    """Distance of averages plus residuals from the sum of a layer's mean gradients, and if it had a
    gradient; for a layer that all ranks use, none, and one."""
    torch.manual_seed(0)
    model = Skipping(0)
    weight, training = model.layers[1].weight, Training(way, name, model, **options)
    wanted, got, there = torch.zeros(20, 20), torch.zeros(20, 20), []
    for step in range(9):
        model.unused = (0, 1, 1 + rank)[step % 3]
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step)) + rank
        model.zero_grad()
        loss = training.module(x).sum()
        (mine,) = torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)
        loss.backward()
        if way == "Synchronizer":
            training.sync.step()
        there.append(weight.grad is not None)
        wanted += 0 if mine is None else mine / world_size
        got += 0 if weight.grad is None else weight.grad
    for side, arrays in hipress.state_dict(training.sync)["states"]["layers.1.weight"].items():
        wanted -= arrays["residual"].float() / (world_size if side == "worker" else 1)
    dist.all_reduce(wanted)
    return (got - wanted).norm().item() / got.norm().item(), there
