"""Ranks of test_steps.py."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import time
import traceback
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hipress
from hipress import compat
from hipress.session import session_of
from tests.hipress.common import SMALL_BUCKETS, make, train
from tests.hipress.fakes import Int8


class Checkpointed(nn.Module):
    """Layers whose inner values are computed again, in a backward pass within the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Heads(nn.Module):
    """A model with two results; only the first layer has a part in both."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 80), nn.Linear(64, 90)

    def forward(self, x):
        return self.one(x).square().mean(), self.two(x).square().mean()


def digest(module):
    values = [p.grad.numpy().tobytes() for p in module.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def passes(rank, _, what, codec):
    """The number of counted steps, and hashes of their gradients."""
    torch.manual_seed(0)
    model = Checkpointed() if what == "reentrant" else Heads()
    ddp = hipress.wrap(model, codec, min_size=0, ddp_kwargs=SMALL_BUCKETS)
    found = []
    for step in range(4):
        ddp.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        if what == "reentrant":
            ddp(x.requires_grad_()).square().mean().backward()
        else:
            one, two = ddp(x)
            if what == "apart" or rank == 1:
                two.backward()
                one.backward()
            else:
                (one + two).backward()
        found.append(digest(ddp))
    return hipress.state_dict(ddp)["counter"], hipress.report(ddp).measured.steps, found


def restore(rank, _):
    """True for each object of an engine that detach frees, with Python's collector disabled."""
    gc.disable()
    ddp = hipress.wrap(make(), Int8(), verify=True)
    ddp(torch.randn(4, 7)).sum().backward()
    engine = session_of(ddp).engine
    held = [
        engine.channels.channel(hosted=False)._executor._transport,
        engine.channels.channel(hosted=False)._executor._transport._group,
    ]
    held.append(engine.channels.verifier._group)
    left = [weakref.ref(one) for one in held]
    del engine, held
    hipress.detach(ddp)
    return [ref() is None for ref in left]


def told(call):
    """Kind and text of the error that a call raises, and the seconds until then."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


def died_in_the_first_step(rank, _, static):
    ddp = hipress.wrap(make(), Int8(), ddp_kwargs={"static_graph": static, **SMALL_BUCKETS})
    loss = ddp(torch.randn(4, 7)).sum()
    if rank == 1:
        os._exit(1)
    return told(loss.backward)


def interrupted(rank, _):
    """Ctrl-C on rank 0 while it waits for rank 1; its state after all payloads arrived."""
    store = dist.distributed_c10d._get_default_store()
    ddp = hipress.wrap(make(), Int8())
    engine = session_of(ddp).engine
    loss = ddp(torch.randn(4, 7)).sum()
    if rank == 1:
        store.wait(["interrupted"])
        return told(loss.backward)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    wait = Future.add_done_callback

    def soon(future, call):  # rings when `finish` is about to wait
        wait(future, call)
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    Future.add_done_callback = soon
    try:
        loss.backward()
    except KeyboardInterrupt:
        found = engine.unfinished
    store.set("interrupted", "")
    for average in engine.reduction.averages:
        told(average.future.wait)
    return found, told(lambda: hipress.state_dict(ddp))


def raised_after_the_last_bucket(rank, _):
    """In the backward pass of the model's input: DDP never hands the averages over."""
    ddp = hipress.wrap(make(), Int8())
    engine = session_of(ddp).engine
    x = torch.randn(4, 7, requires_grad=True)
    before = x * 1
    before.register_hook(lambda _: 1 / 0)
    found = told(ddp(before).sum().backward)
    for average in engine.reduction.averages:
        average.future.wait()
    return found, told(lambda: hipress.state_dict(ddp))


def detached_in_a_hook(rank, _):
    ddp = hipress.wrap(make(), Int8(), ddp_kwargs=SMALL_BUCKETS)
    for _ in range(2):  # there are several buckets from the second step on
        ddp(torch.randn(4, 7)).sum().backward()
    ddp.module.norm.register_full_backward_hook(lambda *_: hipress.detach(ddp))
    found = told(ddp(torch.randn(4, 7)).sum().backward)
    hipress.detach(ddp)
    return found


def no_room(rank, _):
    """A rank that cannot allocate its buffers, and goes on living."""
    ddp = hipress.wrap(make(), Int8())
    if rank == 1:

        def fails(indices):
            raise MemoryError("no room")

        session_of(ddp).engine.buckets.plan_for = fails
    found = told(lambda: ddp(torch.randn(4, 7)).sum().backward())
    dist.barrier()  # no rank leaves before all have the error
    return found, told(lambda: hipress.state_dict(ddp))


def wrapped_anew(rank, _):
    """Wraps again after a step in which rank 1 cannot encode, with DDP's own buckets in between."""
    model = make()
    options = {"exclude": ["first.*", "last.*"], "ddp_kwargs": SMALL_BUCKETS}
    ddp = hipress.wrap(model, Int8(), **options)
    encode = Int8.encode_batch
    if rank == 1:

        def broken(*args, **options):
            raise ValueError("broken")

        Int8.encode_batch = broken
    loss = ddp(torch.randn(4, 7)).sum()
    found = told(loss.backward)
    del ddp, loss
    Int8.encode_batch = encode
    again = hipress.wrap(model, Int8(), **options)
    again.zero_grad()
    again(torch.randn(4, 7)).sum().backward()
    return found, digest(again)


def of_a_group(rank, _):
    """Errors name ranks of the job, not their places in a group."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    ddp = hipress.wrap(make(), Int8(), process_group=group)
    loss = ddp(torch.randn(4, 7)).sum()
    if rank == 2:
        os._exit(1)
    return told(loss.backward)


def unused(rank, world_size):
    """Errors of a model with an unused parameter: by wrap, also without codec, and by attach; and
    of one with a parameter that is frozen after wrap."""
    found = []
    for options in {"compressor": Int8()}, {"compressor": "auto"}, None, {}:
        if options is None:
            ddp = hipress.attach(DistributedDataParallel(make(unused=True)), Int8())
        elif not options:
            ddp = hipress.wrap(make(), Int8())
            ddp.module.first.weight.requires_grad_(False)
        else:
            ddp = hipress.wrap(make(unused=True), **options)
        try:
            train(ddp, rank, range(2))
        except RuntimeError as error:
            found.append((str(error), "".join(traceback.format_exception(error))))
    return found


def compiled(rank, world_size):
    """Graphs that torch.compile makes of a wrapped model, and of DDP alone."""
    counts = []
    for ddp in hipress.wrap(make(), Int8()), DistributedDataParallel(make()):
        torch._dynamo.reset()
        counter = CompileCounter()
        train(torch.compile(ddp, backend=counter), rank, range(2))
        counts.append((counter.frame_count, counter.op_count))
    return counts


def profiled(rank, world_size, settings):
    """Numbers of hipress's events in a profile, by name; checks that it ends."""
    ddp = hipress.wrap(make(), Int8(), exclude="first.*", ddp_kwargs=SMALL_BUCKETS)
    train(ddp, rank, range(2))  # with the buckets that DDP will keep
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **settings) as p:
        train(ddp, rank, range(2))
    train(ddp, rank, range(1))
    found = {}
    for event in p.events():
        if event.name.startswith("hipress:"):
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    over = not isinstance(compat.profiled("x"), torch.profiler.record_function)
    shortest = min(max(times) for times in found.values())
    return {name: len(times) for name, times in found.items()}, shortest > 0, over
