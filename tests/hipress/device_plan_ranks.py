"""Ranks of test_device_plans.py: plans that change on emulated devices, over gloo."""

from __future__ import annotations

import gc
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

import hipress
from casync.memory.host import HostMemory
from casync.topology import Topology
from hipress import options
from hipress.channel import executors
from hipress.choose import evidence, levels, places, probe, search, trial
from hipress.choose.planner import Planner, codecs_of
from hipress.choose.rules import NO_RULES
from hipress.codecs import compile_codec
from hipress.model.devices import NCCL, ON_HOST, Placement
from hipress.model.params import describe
from hipress.ranks import coordinator as coordinators
from tests.casync import emulated
from tests.casync.streams import FakeMoment, Schedule
from tests.casync.test_device import GPU
from tests.hipress.common import averaged, engine_of_world
from tests.hipress.device_ranks import exported, gradients, slots_by
from tests.hipress.policy_ranks import spiked

POLICIES = {
    "Warmup": hipress.Warmup("topk", ratios=(0.1, 0.01, 0.001), steps=3),
    "GraVAC": hipress.GraVAC("topk", (0.1, 0.01, 0.001), window=4, every=2, flat=0.99),
    "Accordion": hipress.Accordion("topk", low=0.1, high=0.01, window=3),
}
TRIED = [("onebit_group", "onebit_group", {}), ("topk", "topk", {"ratio": 0.01})]


@contextmanager
def device(rank, gpu=False):
    """A device's memory, with codecs for CUDA. gpu: a real device, which ranks share."""
    if gpu:
        yield GPU()
        return
    schedule = Schedule(rank)
    memory = emulated.DeviceMemory(schedule)

    def compiled(name, params, target="cpu"):
        if target == "cuda":
            return emulated.Launched(emulated.compiled(name, **params), memory)
        return compile_codec(name, params, target)

    with ExitStack() as stack:
        stack.enter_context(schedule.driving())
        for module in (levels, search):
            stack.enter_context(mock.patch.object(module, "compile_codec", compiled))
        yield memory


def params_of(*shapes):
    return describe(torch.nn.ParameterList([torch.zeros(shape) for shape in shapes]))


def step(engine, buckets):
    averaged(engine, {(index,): bucket for index, bucket in enumerate(buckets)})


def steered(params, policy, coordinator, placement, memory):
    """An engine with a policy."""
    wanted = options.make("auto", policy=policy, min_size=0, timeout=60)
    placed = mock.patch.object(Placement, "memory", return_value=memory)
    with placed:
        codecs = codecs_of(wanted, placement)
        planner = Planner(params, wanted, Topology.flat(2), NO_RULES, coordinator, placement)
        made = planner.plan(codecs)
        return engine_of_world(
            params, made.plan, wanted, dist.group.WORLD, coordinator,
            placement=placement, memory=memory, chooser=made.controller(),
        )  # fmt: skip


def by_policy(rank, size, name, gpu=False):
    """Averages and those on the host, levels by step, and the number of waits for steps."""
    params, labels, waits = params_of((64, 64), (64, 64)), [], []
    with device(rank, gpu) as memory:
        staged = Placement(memory.device, "staged")
        engines = [
            steered(params, POLICIES[name], coordinators.coordinator(dist.group.WORLD, 60), *where)
            for where in ((staged, memory), (ON_HOST, HostMemory()))
        ]
        since = FakeMoment.since
        with mock.patch.object(
            FakeMoment, "since", lambda *pair: waits.append(len(labels)) or since(*pair)
        ):
            for number in range(14):
                falling = spiked(rank, 0, 0.01).view(-1) * 0.25 ** (number // 3)
                given = [spiked(rank, number, 0.01).view(-1), falling * (1 + rank)]
                theirs = [memory.filled(values) for values in given]
                for engine, buckets in zip(engines, (theirs, given), strict=True):
                    step(engine, buckets)
                assert all(torch.equal(x.cpu(), y) for x, y in zip(theirs, given, strict=True)), (
                    number
                )
                found = [[d.codec for d in engine.plan.decisions] for engine in engines]
                assert found[0] == found[1], number
                labels.append(found[0])
        dist.barrier()
        for engine in engines:
            engine.close()
    return labels, sorted(set(waits))


def quick(stack):
    """Short trials of few codecs, which are timed with few elements."""
    for where, name, value in (
        (trial, "COUNTED", 3), (trial, "SLOW", 1e9), (search, "MIN_GAIN_SECONDS", -1e9),
        (search, "FAR", 1e9), (places, "FAR", 1e9), (search, "SHARE", 0.0),
        (probe, "ELEMENTS", (1 << 7, 1 << 9)),
        (probe, "REPEATS", 1), (probe, "SIDES", (8, 8)), (probe, "WORKED", (64, 64)),
        (probe, "HUGE", 1 << 16), (probe, "LARGE", 1 << 14),
        (evidence, "trusted", lambda optimizer: TRIED),
    ):  # fmt: skip
        stack.enter_context(mock.patch.object(where, name, value))


def by_trial(rank, size, gpu=False, transport="staged"):
    """Results of a trial on a device; averages by step, and their losses; steps with waits."""
    params, waits = params_of((64, 64), (100,)), []
    with device(rank, gpu) as memory, ExitStack() as stack:
        quick(stack)
        stack.enter_context(mock.patch.object(Placement, "memory", return_value=memory))
        if transport in NCCL and not gpu:
            for module in (executors, places):
                stack.enter_context(slots_by(memory.schedule, module))
        staged = Placement(memory.device, transport)
        coordinator = coordinators.coordinator(dist.group.WORLD, 60)
        wanted = options.make("auto", min_size=0, timeout=60)
        codecs = codecs_of(wanted, staged)
        planner = Planner(params, wanted, Topology.flat(2), NO_RULES, coordinator, staged)
        made = planner.plan(codecs)
        engine = engine_of_world(
            params, made.plan, wanted, dist.group.WORLD, coordinator,
            placement=staged, memory=memory, chooser=made.controller(), unused=True,
        )  # fmt: skip
        chooser, after, averages = engine.chooser, 0, []
        since = FakeMoment.since
        stack.enter_context(
            mock.patch.object(FakeMoment, "since", lambda *p: waits.append(after) or since(*p))
        )
        total = exact = torch.zeros(sum(p.numel for p in params))
        while after < 10:
            number = len(averages)
            values = gradients(params, rank, number)
            theirs = [memory.filled(x) for x in values.split([p.numel for p in params])]
            step(engine, theirs)
            averages.append(torch.cat([each.cpu() for each in theirs]))
            after += chooser.trial_seconds is not None
            total = total + averages[-1]
            exact = exact + sum(gradients(params, r, number) for r in range(size)) / size
        shared = engine.buckets.undelivered(range(len(params))).cpu()
        dist.all_reduce(shared)
        off = (total + shared / size - exact).abs().max().item()
        tried = [(each.plan, each.verdict, each.steps) for each in chooser.tried]
        plans = engine.chooser.plans
        averages += resumed_on_host(engine, memory, params, rank)
        pinned = [pinned_by(engine, memory, params, plans, hosted) for hosted in (True, False)]
        dist.barrier()
        engine.close()
    return torch.stack(averages).tolist(), tried, off, sorted(set(waits)), chooser.costs, pinned


def pinned_by(engine, memory, params, plans, hosted):
    """Bytes of pinned memory in use after a step with a plan of one place."""
    engine.chooser.hold(next(plan for plan in plans if plan.hosted == hosted))
    step(engine, [memory.filled(torch.ones(p.numel)) for p in params])
    gc.collect()
    return sum(each.nbytes() for each in memory.staged)


def resumed_on_host(engine, memory, params, rank):
    """Averages of steps after loading a checkpoint whose plan compresses on the host."""
    plan = next(plan for plan in engine.chooser.plans if plan.hosted)
    again = engine.chooser.restored(plan.by_name)
    assert again.hosted
    assert again.facts() == plan.facts()
    engine.resume(engine.step, engine.buckets_of(again))
    found = []
    for number in range(2):
        values = gradients(params, rank, number).split([p.numel for p in params])
        theirs = [memory.filled(x) for x in values]
        step(engine, theirs)
        found.append(torch.cat([each.cpu() for each in theirs]))
    assert engine.buckets.residuals.memory.host
    left = exported(engine, rank, 2)
    assert any(values.any() for values in left)
    return found
