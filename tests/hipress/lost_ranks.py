"""Ranks of test_lost.py."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import hipress
from hipress import compat, session
from hipress.choose import probe
from hipress.ranks import coordinator, groups, mailbox
from tests.hipress.common import codec, error_of, make, train
from tests.patience import HANG, SILENCE

# function in which a rank is lost, and number of its calls before that
PLACES = {
    "before it is heard of": (session, "place", 0),
    "compiling": (session, "codecs_of", 0),
    "measuring": (probe, "_best", 3),
    "connecting": (compat, "gloo_group", 0),
}


def at(place, signal_number):
    """Send this process a signal in the function, once; returns how to undo the patch."""
    module, name, times = PLACES[place]
    before, passed = getattr(module, name), [0]

    def call(*args, **options):
        passed[0] += 1
        if passed[0] == times + 1:
            signal.raise_signal(signal_number)
            raise RuntimeError("where this is a thread of its own, it must not go on")
        return before(*args, **options)

    setattr(module, name, call)
    return lambda: setattr(module, name, before)


def wrap(place):
    """With "auto" if the link is to be measured."""
    name = "auto" if place == "measuring" else codec("int8")
    return hipress.wrap(make(), name, timeout=HANG)


def killed(rank, world_size, place):
    """The last rank is killed in wrap."""
    if rank == world_size - 1:
        at(place, signal.SIGKILL)
    return error_of(wrap, place)


def keeper_killed(rank, world_size, place):
    """Rank 0, which keeps the job's store, is killed in a collective of "wrap", or of a "step"."""
    kept = kept_by_rank_0(rank)
    compat.job_store = lambda: kept
    if rank == 0 and place == "wrap":
        groups.broadcast = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    model = make()

    def steps():
        sync = hipress.Synchronizer(model, codec("int8"), timeout=HANG)
        for number in range(4):
            if (rank, number, place) == (0, 2, "step"):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(4, 7)).sum().backward()
            sync.step()

    return error_of(steps)


def kept_by_rank_0(rank):
    """A store that ends or stops with rank 0."""
    own = dist.distributed_c10d._get_default_store()
    if rank == 0:
        kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        own.set("port", str(kept.port))
        return kept
    return TCPStore("127.0.0.1", int(own.get("port")), wait_for_workers=False)


def keeper_stopped(rank, world_size):
    """Rank 0, which keeps the store, is stopped before a meeting. Rank 1 waits less long than
    rank 2, and ends."""
    own, kept = dist.distributed_c10d._get_default_store(), kept_by_rank_0(rank)
    ranks = coordinator.Coordinator.on(kept, rank, range(world_size), "all", HANG)
    ranks.require_equal({})
    ranks.mailbox.ended()  # connects to the others
    own.set(f"met/{rank}", str(os.getpid()))
    own.wait([f"met/{each}" for each in range(world_size)])
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.timeout = SILENCE / 5 if rank == 1 else SILENCE
    found = error_of(ranks.require_equal, {})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(int(own.get("met/0")), signal.SIGKILL)
    return found


def interrupted(rank, world_size):
    """Ctrl-C on the last rank, in one place after the other; then all ranks wrap together."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start jobs without
    found = {}
    for place in PLACES:
        undo = at(place, signal.SIGINT) if rank == world_size - 1 else None
        try:
            found[place] = error_of(wrap, place)
        except KeyboardInterrupt:
            found[place] = "interrupted"
        if undo is not None:
            undo()
        dist.barrier()
    found["at last"] = len(train(wrap(""), rank, range(2)))
    return found


def interrupted_while_it_waits(rank, _):
    """Ctrl-C on rank 0 while it waits for the others, which come later."""
    store = dist.distributed_c10d._get_default_store()
    if rank > 0:
        store.wait(["interrupted"])
        return error_of(wrap, "")
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    looks = mailbox.StoreMailbox.look

    def look(*args, **named):  # rings once, when it has looked for the others
        found = looks(*args, **named)
        mailbox.StoreMailbox.look = looks  # not again while it tells them
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        return found

    mailbox.StoreMailbox.look = look
    try:
        wrap("")
    except KeyboardInterrupt:
        store.set("interrupted", "")
        return "interrupted"
    return "wrapped"
