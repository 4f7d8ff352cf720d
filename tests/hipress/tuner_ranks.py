"""Ranks of test_tuner.py."""

from __future__ import annotations

import dataclasses
import os
import threading
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compll
import hipress
import hipress.choose.search
from casync.cost import CodecCost, Costs, Line, Transfer
from casync.topology import Topology
from compll.runtime.codec import Codec
from hipress import optim, options
from hipress.choose import probe, trial
from hipress.choose.chooser import Chooser
from hipress.choose.places import Places
from hipress.choose.plan import Plan, fixed_plan, raw
from hipress.codecs import NATIVE
from hipress.model.params import describe
from hipress.ranks import coordinator as coordinators
from hipress.session import session_of
from tests.hipress.common import (
    SMALL_BUCKETS,
    UNREBUILT,
    averaged,
    data,
    digest,
    engine_of_world,
    error_of,
    make,
    train,
)
from tests.hipress.fakes import Halves, Int8, Sparse


class Script(Chooser):
    """A Chooser with a given plan for each step."""

    def __init__(self, plans):
        super().__init__(plans[0])
        self.codecs = {key: codec for plan in plans for key, codec in plan.codecs.items()}
        self._next = iter(plans)

    def next(self, step, uncaptured=""):
        return next(self._next)


PLANS = {
    "int8": (Int8, "ps"),
    "ring": (Int8, "ring"),
    "nodes": (Int8, "hierarchical"),
    "all": (Int8, "exchange"),
    "sparse": (Sparse, "exchange"),
    "adacomp": (partial(compll.compile, "adacomp"), "exchange"),
    "efsignsgd": (partial(compll.compile, "efsignsgd", lr=0.5), "exchange"),
    "thc": (partial(compll.compile, "thc"), "allreduce"),
}


def made(params, name, topology) -> Plan:
    if name == NATIVE:
        return Plan(tuple(raw(p, "asked for") for p in params), topology)
    codec, strategy = PLANS[name]
    wanted = options.make(codec(), strategy=strategy, min_size=0)
    return fixed_plan(params, codec(), wanted, topology)


def gradients(params, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(sum(p.numel for p in params), generator=generator)


def handed_on(rank, world_size, names, scope):
    """Distance of sums of averages from sums of computed gradients, by step; and their digests."""
    params = describe(make())
    topology = Topology.of([range(2), range(2, 4)]) if world_size == 4 else Topology.flat(2)
    plans = {name: made(params, name, topology) for name in names}
    script = [plans[name] for name in names]
    wanted = options.make("auto", min_size=0, timeout=30, scope=scope)
    group = dist.group.WORLD
    engine = engine_of_world(
        params,
        script[0],
        wanted,
        group,
        coordinators.coordinator(group, 30),
        chooser=Script(script),
    )
    total = exact = torch.zeros(1)
    found = []
    for step in range(len(script)):
        buffer = gradients(params, rank, step)
        averaged(engine, {tuple(range(len(params))): buffer})
        total = total + buffer
        exact = exact + sum(gradients(params, r, step) for r in range(world_size)) / world_size
        found.append(((total - exact).abs().max().item(), total.tolist()))
    engine.close()
    return found


def slow_link(*_):
    """The result of a link probe with which every codec is worth a try."""
    slow = dict.fromkeys(probe.DTYPES, Transfer(Line(1e-3, 1e-6)))
    return Costs({1: Transfer(Line(1e-5, 1e-9))}, slow)


def fast_codecs(group, codecs, link, *_):
    """The result of a codec probe with nearly free codecs."""
    work = CodecCost(*[Line(1e-6, 1e-10)] * 3)
    return dataclasses.replace(link, codecs=dict.fromkeys(codecs, work))


def quick(plans=None):
    """Trials of short turns with all plans. plans: fake codecs."""
    trial.COUNTED = 3
    hipress.choose.search.MIN_GAIN_SECONDS = 0.0
    hipress.choose.search.FAR = 1e9
    trial.SLOW = 1e9
    hipress.choose.search.SHARE = 0.0
    probe.measure_link, probe.measure_codecs = slow_link, fast_codecs
    if plans is not None:
        hipress.choose.search.candidates = lambda *_, **__: {c.name: c for c in plans}


def steps(sync, model, rank, count):
    """Training without DDP."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(count):
        x, y = data(rank, step)
        torch.nn.functional.mse_loss(model(x), y).backward()
        sync.step()
        optimizer.step()
        optimizer.zero_grad()


def through_trial(ddp, take):
    """Take steps until codecs are compiled and a plan is kept, on all ranks at once."""
    while hipress.report(ddp).trial_seconds is None:
        take()


def agreed(rank, world_size, way):
    """A whole trial with real codecs: report, text, digest."""
    quick()
    model = make(unused=way == "unused")
    if way == "synchronizer":
        ddp = hipress.Synchronizer(model, verify=True)
        through_trial(ddp, lambda: steps(ddp, model, rank, 10))
    else:
        if way == "attach":
            ddp = hipress.attach(DistributedDataParallel(model), verify=True)
        else:
            kwargs = UNREBUILT if way == "unused" else {"bucket_cap_mb": 0.02}
            ddp = hipress.wrap(model, verify=True, ddp_kwargs=kwargs)
        through_trial(ddp, lambda: train(ddp, rank, range(10)))
    report = hipress.report(ddp)
    return report.to_dict(), str(report), digest(model)


def left_alone(rank, world_size):
    """Reasons for uncompressed parameters if no compressor is worth trying."""
    quick(plans=[])
    report = hipress.report(hipress.wrap(make()))
    return report.why, {decision.why for decision in report.decisions}


def compiled_meanwhile(rank, world_size):
    """Steps while a compiler, on one rank only, does not end; plans tried by then, and after it."""
    quick()
    may_end = threading.Event()
    compile_all = Places.compile

    def slowly(places, check):
        if rank == 1:
            may_end.wait()
        return compile_all(places, check)

    Places.compile = slowly
    ddp = hipress.wrap(make(), ddp_kwargs={"bucket_cap_mb": 0.02})
    train(ddp, rank, range(8))
    before = len(hipress.report(ddp).tried)
    may_end.set()
    through_trial(ddp, lambda: train(ddp, rank, range(10)))
    return before, len(hipress.report(ddp).tried)


def backends(rank, world_size, freezes):
    """Backends of the codecs that encode in a trial. freezes: before an optimizer's freeze."""
    quick()
    found = set()
    encode = Codec.encode_batch

    def watched(codec, *args, **more):
        found.add(codec.target)
        return encode(codec, *args, **more)

    Codec.encode_batch = watched
    model = make()
    optimizer = optim.AdamW(model.parameters(), freeze=10**6) if freezes else None
    codec = "onebit_fine" if freezes else "auto"
    ddp = hipress.wrap(model, codec, optimizer=optimizer, ddp_kwargs=SMALL_BUCKETS)
    through_trial(ddp, lambda: train(ddp, rank, range(10)))
    return found, len(hipress.report(ddp).tried)


def dies(rank, world_size):
    """Rank 1 dies during a trial; the errors of rank 0."""
    quick()
    ddp = hipress.wrap(make(), timeout=60)
    train(ddp, rank, range(3))
    if rank == 1:
        os._exit(1)
    return error_of(train, ddp, rank, range(3, 10))


def stops(rank, world_size):
    """Rank 1's next step fails before it begins; the errors of the ranks."""
    quick()
    ddp = hipress.wrap(make(), timeout=60)
    train(ddp, rank, range(3))
    if rank == 1:
        session_of(ddp).engine.fail(RuntimeError("out of paper"), "this test")
    first = error_of(train, ddp, rank, range(3, 4))
    return first, error_of(train, ddp, rank, range(4, 5))


def resumed(rank, world_size):
    """Loads a state, saved by a trial's kept plan, where a trial begins."""
    quick([Int8(), Halves()])
    ddp = hipress.wrap(make())
    engine = session_of(ddp).engine
    found = engine.chooser._places.first.search.plans(
        fast_codecs(None, ["int8_fake", "half_fake"], slow_link())
    )
    int8 = next(plan for plan in found if "int8" in plan.label)
    engine.resume(0, engine.buckets_of(int8))
    train(ddp, rank, range(4), momentum=0.0)
    saved, model = hipress.state_dict(ddp), {k: v.clone() for k, v in ddp.state_dict().items()}
    train(ddp, rank, range(4, 8), momentum=0.0)
    again = hipress.wrap(make())
    again.load_state_dict(model)
    hipress.load_state_dict(again, saved)
    train(again, rank, range(4, 8), momentum=0.0)
    labels = {d.codec for d in hipress.report(again).decisions}
    return digest(ddp), digest(again), labels, saved["codecs"] != {}


def by_word(rank, world_size, momentum, accepted):
    """Plans with rounds that a trial tried; reasons by codec; the accept_loss; a digest."""
    quick()
    usual = hipress.choose.search.candidates
    hipress.choose.search.candidates = lambda *args, **more: {
        key: codec for key, codec in usual(*args, **more).items() if "powersgd" in key
    }
    model, whys = make(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
    ddp = hipress.wrap(
        model, optimizer=optimizer, accept_loss=accepted, verify=True, ddp_kwargs=SMALL_BUCKETS
    )
    report = hipress.report(ddp)
    while report.installed and report.trial_seconds is None:
        train(ddp, rank, range(5), momentum=momentum)
        report = hipress.report(ddp)
        whys |= {each.codec: each.why for each in report.decisions if each.codec}
    return [each.plan for each in report.tried], whys, report.options["accept_loss"], digest(model)


def zeroed(rank, world_size):
    """The last averages of the same gradients: by PowerSGD after a turn of it and a native step,
    after native steps, and after a turn."""
    params = describe(make())
    codec = compll.compile("powersgd", rank=2)
    wanted = options.make("auto", min_size=0, timeout=30)
    low_rank = fixed_plan(params, codec, wanted, Topology.flat(world_size))
    native = made(params, NATIVE, Topology.flat(world_size))
    group, found = dist.group.WORLD, []
    for first in ([low_rank, native], [native, native], [low_rank, low_rank]):
        script = [*first, low_rank]
        engine = engine_of_world(
            params,
            script[0],
            wanted,
            group,
            coordinators.coordinator(group, 30),
            chooser=Script(script),
        )
        for _ in script:
            buffer = gradients(params, rank, 0)
            averaged(engine, {tuple(range(len(params))): buffer})
        engine.close()
        found.append(buffer.tolist())
    return found
