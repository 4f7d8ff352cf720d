"""Ranks of test_devices.py: the engine on emulated devices, over gloo."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist

import compll
import hipress
from casync.runtime.executor import Executor
from casync.topology import Topology
from casync.transports.distributed import DistributedTransport
from hipress import options, session
from hipress.channel import executors
from hipress.choose.plan import fixed_plan
from hipress.engine import saving
from hipress.errors import HipressError
from hipress.model.devices import Placement
from hipress.model.params import describe
from hipress.ranks import coordinator as coordinators
from hipress.ranks.groups import connect
from tests.casync.emulated import DeviceMemory, Garbled, compiled
from tests.casync.streams import Schedule
from tests.hipress.common import (
    SMALL_BUCKETS,
    averaged,
    data,
    digest,
    engine_of_world,
    make,
    train,
)
from tests.hipress.fakes import Int8

SHAPES = ((1, 40), (30, 100))


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(n, m, bias=False) for m, n in SHAPES)


def engine_of(params, codec, coordinator, strategy="auto", min_size=0, **how):
    wanted = options.make(
        "onebit_group", min_size=min_size, timeout=coordinator.timeout, strategy=strategy
    )
    topology = Topology.flat(len(coordinator.ranks))
    plan = fixed_plan(params, codec, wanted, topology)
    return engine_of_world(params, plan, wanted, dist.group.WORLD, coordinator, **how)


def gradients(params, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(sum(p.numel for p in params), generator=generator)


def reduced(engine, bucket):
    """A step of one bucket."""
    averaged(engine, {tuple(range(len(engine.params))): bucket})


def alike(rank, size, dtype):
    """Averages and states of three steps, and those of an engine on the host."""
    params, schedule = describe(model().to(dtype)), Schedule(rank)
    memory = DeviceMemory(schedule)
    placement = Placement(memory.device, "staged")
    with schedule.driving():
        device = engine_of(
            params, compiled("onebit_group"), coordinators.coordinator(dist.group.WORLD, 60),
            placement=placement, memory=memory,
        )  # fmt: skip
        coordinator = coordinators.coordinator(dist.group.WORLD, 60)
        host = engine_of(params, compll.compile("onebit_group"), coordinator)
        for step in range(3):
            values = gradients(params, rank, step).to(dtype)
            bucket = memory.filled(values)
            reduced(device, bucket)
            reduced(host, values)
            assert torch.equal(memory.download(bucket), values)
        same_states(device, host, rank, size)
        dist.barrier()
        device.close()
        host.close()


BUCKETS = ((0,), (1,))


def hosted(rank, size, dtype, codec, strategy, min_size):
    """Averages and states of three steps with a device's gradients compressed on the host, and
    those of an engine there. With `min_size` the first of two buckets is not compressed."""
    how = {"strategy": strategy, "min_size": min_size, "unused": True}
    two_buckets(rank, size, dtype, "host", compll.compile(codec), compll.compile(codec), how)


def uncompressed(rank, size, dtype):
    """The same with gradients compressed on the device, except those of the first bucket."""
    codecs = compiled("onebit_group"), compll.compile("onebit_group")
    two_buckets(rank, size, dtype, "staged", *codecs, {"min_size": 1000})


def over_slots(rank, size, dtype, codec):
    """The same for device memory that travels by itself: none of it goes to the host."""
    codecs = compiled(codec), compll.compile(codec)
    two_buckets(rank, size, dtype, "nccl", *codecs, {"min_size": 1000})


class Slots:
    """A transport without tags for an emulated device, over one for the host's memory."""

    def __init__(self, inner, schedule):
        self._inner, self._schedule = inner, schedule
        self.rank, self.world_size = inner.rank, inner.world_size
        self.abort, self.close = inner.abort, inner.close

    def exchange(self, transfers):
        handles, done = [self._post(each) for each in transfers], threading.Event()

        def wait():
            for handle in handles:
                handle.wait(60)
            done.set()
            with self._schedule.changed:
                self._schedule.changed.notify_all()

        threading.Thread(target=wait, daemon=True).start()
        return done.is_set

    def _post(self, transfer):
        data = getattr(transfer.data, "inside", transfer.data)
        if transfer.kind == "reduce":
            return self._inner.post_reduce(data, transfer.ranks, transfer.op)
        (peer,) = transfer.ranks
        post = self._inner.post_send if transfer.kind == "send" else self._inner.post_recv
        return post(data, peer, 0)


def slots_by(schedule, module=executors):
    """A stand-in for a module's start_slots."""

    def start(purpose, coordinator, placement, memory, tell=None):
        if placement.on_host:
            return None
        inner = DistributedTransport(
            connect(coordinator, purpose), lambda some: connect(coordinator.of(some), purpose)
        )
        return Slots(inner, schedule)

    return mock.patch.object(module, "start_slots", start)


def two_buckets(rank, size, dtype, transport, codec, hosts_codec, how):
    params, schedule = describe(model().to(dtype)), Schedule(rank)
    memory, through = DeviceMemory(schedule), transport != "nccl"
    with schedule.driving(), slots_by(schedule):
        device, host = (
            engine_of(params, each, coordinators.coordinator(dist.group.WORLD, 60), **how, **where)
            for each, where in (
                (codec, {"placement": Placement(memory.device, transport), "memory": memory}),
                (hosts_codec, {}),
            )
        )
        staged = []
        for step in range(3):
            values = gradients(params, rank, step).to(dtype)
            pieces = values.split([param.numel for param in params])
            theirs = [memory.filled(piece) for piece in pieces]
            for engine, each in ((device, theirs), (host, pieces)):
                averaged(engine, dict(zip(BUCKETS, each, strict=True)))
            assert all(map(torch.equal, map(memory.download, theirs), pieces))
            staged.append(len(memory.staged))
        assert through == (staged[0] > 0)
        assert staged[0] == staged[-1], "pinned memory is made once"
        assert all(map(torch.equal, *(exported(each, rank, size) for each in (device, host))))
        travelled = device.traffic.raw_bytes if through else device.traffic.mixed_bytes
        assert travelled == host.traffic.raw_bytes
        assert (host.traffic.raw_bytes > 0) == (how["min_size"] > 0)
        dist.barrier()
        device.close()
        host.close()


def in_turn(rank, size):
    """The averages of a bucket wait for its own job only."""
    params, schedule, calls = describe(model()), Schedule(rank), []
    memory = DeviceMemory(schedule)
    settle, submit = Executor.settle, Executor.submit

    def submitted(executor, *args, **how):
        made.append(submit(executor, *args, **how))
        return made[-1]

    def settled(executor, future=None):
        calls.append(next((i for i, each in enumerate(made) if each is future), None))
        settle(executor, future)

    with (
        schedule.driving(),
        mock.patch.object(Executor, "settle", settled),
        mock.patch.object(Executor, "submit", submitted),
    ):
        engine = engine_of(
            params, compiled("onebit_group"), coordinators.coordinator(dist.group.WORLD, 60),
            placement=Placement(memory.device, "staged"), memory=memory, skips=True,
        )  # fmt: skip
        for step in range(2):
            made, values = [], gradients(params, rank, step)
            pieces = values.split([param.numel for param in params])
            round_ = engine.begin()
            for indices, bucket in zip(BUCKETS, map(memory.filled, pieces), strict=True):
                round_.reduce(indices, bucket)
            round_.finish(lambda number: calls.append(f"took {number}"))
            assert calls == [0, "took 0", 1, "took 1"], calls
            calls.clear()
        dist.barrier()
        engine.close()


def wrapped(rank, size, ways):
    """Digests of models after some steps, by way, with the copies to the host and without; the
    memory is the host's, so no device is needed."""
    found = {}
    for name, (way, given, unused) in ways.items():
        for transport in ("gloo", "host"):
            there = Placement(torch.device("cpu"), transport)
            with mock.patch.object(session, "place", lambda *_, there=there: there):
                found.setdefault(name, []).append(trained(rank, way, given, unused))
    return found


def trained(rank, way, given, unused):
    module = make(unused)
    if way == "wrap":
        kwargs = SMALL_BUCKETS | {"find_unused_parameters": unused}
        ddp = hipress.wrap(module, ddp_kwargs=kwargs, timeout=60, **given)
        train(ddp, rank, range(6))
        hipress.detach(ddp)
        return digest(module)
    sync = hipress.Synchronizer(module, timeout=60, **given)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    for step in range(6):
        x, y = data(rank, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x), y).backward()
        sync.step()
        optimizer.step()
    hipress.detach(sync)
    return digest(module)


def lost(rank, size):
    """Errors of a rank whose peer fails in the step, and in the next."""
    params, schedule = describe(model()), Schedule(rank)
    memory = DeviceMemory(schedule)
    with schedule.driving():
        engine = engine_of(
            params, compll.compile("topk", ratio=0.1),
            coordinators.coordinator(dist.group.WORLD, 60),
            placement=Placement(memory.device, "host"), memory=memory,
        )  # fmt: skip
        told = []
        for step in range(2):
            try:
                if rank == size - 1:
                    engine.fail(RuntimeError("no gradient"), "a backward pass")
                reduced(engine, memory.filled(gradients(params, rank, step)))
            except HipressError as error:
                told.append(f"{type(error).__name__}: {error}")
        engine.close()
    return told


def same_states(device, host, rank, size):
    """True if the saved states are equal, and each engine can load the other's."""
    wanted = exported(host, rank, size)
    assert any(values.any() for values in wanted)
    assert all(map(torch.equal, exported(device, rank, size), wanted))
    other = device.buckets_of(device.plan)
    state = saving.export([rank, size], host.buckets.residuals, host.step)
    saving.restore(other.residuals, state, list(device.params))
    again = saving.export([rank, size], other.residuals, device.step)["states"]
    assert all(map(torch.equal, tensors(again), wanted))


def exported(engine, rank, size):
    """A checkpoint's values."""
    residuals = engine.buckets.residuals
    return tensors(saving.export([rank, size], residuals, engine.step)["states"])


def tensors(state):
    """Values of a checkpoint, in order."""
    sides = (side for _, param in sorted(state.items()) for _, side in sorted(param.items()))
    return [values for side in sides for _, values in sorted(side.items())]


class ForCuda(Int8):
    """A codec like those of compll.compile(..., "cuda")."""

    target = "cuda"


def refused(rank, size, where, asked, alone):
    """The error for an impossible placement; the other ranks ask for that or a possible one."""
    if alone and rank > 0:
        asked, where = {}, None
    placed = mock.patch.object(session, "place", return_value=where and Placement(*where))
    with (
        placed if where else nullcontext(),
        mock.patch.dict(sys.modules, {"cupy": None, "nccl": None}),
    ):
        try:
            hipress.wrap(
                torch.nn.Linear(64, 64), **{"compressor": "onebit_group"} | asked, timeout=30
            )
        except HipressError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def broken(rank, size, strategy):
    """A kernel's error for the last rank's payload ends the step of the rank that finds it, and the
    next step on all ranks."""
    params, schedule = describe(model()), Schedule(rank)
    memory = DeviceMemory(schedule)
    with schedule.driving():
        engine = engine_of(
            params, Garbled(compiled("topk", ratio=0.1), rank == size - 1),
            coordinators.coordinator(dist.group.WORLD, 60),
            strategy, placement=Placement(memory.device, "staged"), memory=memory,
        )  # fmt: skip
        try:
            for step in range(2):
                reduced(engine, memory.filled(gradients(params, rank, step)))
        except HipressError as error:
            return f"step {step}: {type(error).__name__}: {error}"
        finally:
            engine.close()
    return "nothing"
