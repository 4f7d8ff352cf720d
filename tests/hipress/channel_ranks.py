"""Ranks of test_exchange.py."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import torch
import torch.distributed as dist

import hipress
from hipress import compat, options
from hipress.channel import channel as channels
from hipress.channel.channel import Channel
from hipress.channel.exchange import Exchange, Piece, rows
from hipress.codecs import compile_codec
from hipress.ranks import coordinator as coordinators
from tests.hipress.common import error_of, raised_by
from tests.hipress.toy_way import BufferAverages
from tests.patience import HANG, SILENCE


def channel(**given) -> Channel:
    """A channel of all ranks."""
    group = torch.distributed.group.WORLD
    made = options.make("none", timeout=60.0)
    return Channel("test", made, coordinators.coordinator(group, 60.0), **given)


def values(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


def distance(found, exact) -> float:
    """Relative error of the mean of several tensors."""
    return float((torch.stack(found).mean(0) - exact).norm() / exact.norm())


def halves(rank, world_size, name):
    """Rows summed at their owners, and rows given to all, with feedback, in eight steps of equal
    values: errors in the first step and of all, and the values that all hold alike."""
    made, elements = channel(), 3000 * world_size
    key = made.add(compile_codec(name, {}))
    push, pull = (
        made.with_states(named_rows(title, 3000, world_size, Piece(0, key, strategy)))
        for title, strategy in (("gradients", "push"), ("weights", "pull"))
    )
    every = torch.stack([values(each, elements) for each in range(world_size)])
    mine = slice(3000 * rank, 3000 * (rank + 1))
    owners = torch.cat([row[3000 * r : 3000 * (r + 1)] for r, row in enumerate(every)])
    sums, copies, untouched = [], [], True
    for _ in range(8):
        summed, given = values(rank, elements), values(rank, elements)
        made.submit(summed, push, draw=0).wait()
        made.submit(given, pull, draw=0).wait()
        sums.append(summed[mine].clone())
        copies.append(given)
        summed[mine] = every[rank][mine]
        untouched &= torch.equal(summed, every[rank])
    wanted = ((sums, every.sum(0)[mine]), (copies, owners))
    errors = [[distance(found[:count], exact) for count in (1, 8)] for found, exact in wanted]
    sizes = [
        [array.size for arrays in each.states.values() for array in arrays.values()]
        for each in (push, pull)
    ]
    part = replace(push, pieces=push.pieces[:1])
    error = raised_by(made.submit, torch.ones(12), part, draw=0)
    made.close()
    return errors, untouched, torch.stack(copies).tolist(), sizes, error


def named_rows(name: str, length: int, ranks: int, piece: Piece) -> Exchange:
    """An exchange of a row of this length for each rank, whose states are kept by row."""
    pieces = rows([replace(piece, length=length)], ranks)
    named = (replace(each, name=f"{name} {i}") for i, each in enumerate(pieces))
    return Exchange(name, tuple(named))


def sums(length: int) -> Exchange:
    """The exchange of two uncompressed rows, which are summed at their owners."""
    return Exchange("", rows([Piece(length // 2, strategy="push")], 2))


def many_lengths(rank, world_size):
    """Programs that are kept after many lengths, and keys of the store before and after more."""
    made = channel(most=1 << 20)
    key, keys, right = made.add(compile_codec("int8_group", {})), [], True
    for number in range(40):
        tensor = torch.full((50_000 + number,), float(rank))
        made.submit(tensor, Exchange("", (Piece(len(tensor), key, "ps"),)), draw=number).wait()
        right &= bool((tensor - 0.5).abs().max() < 0.01)
        if number in (9, 39):
            gc.collect()
            keys.append(compat.job_store().num_keys())
    kept = len(made._executor._prepared)
    made.close()
    return right, kept, keys


def overlapping_on_a_rank(rank, world_size):
    """Kinds that are kept, and the sums, where one rank's tensors of a kind overlap and another's
    do not; those of one tensor of each kind fit, those of two of one do not."""
    made, store = channel(most=4 * 5000), compat.job_store()
    made.submit(torch.ones(2000), sums(2000), draw=0).wait()
    if rank == 1:
        store.get("overlap")
    total = []
    for number, length in enumerate((2000, 2000, 2500, 2000)):
        tensor = torch.ones(length)
        future = made.submit(tensor, sums(length), draw=0)
        total.append((tensor, length // 2))
        if rank == 0 and number == 0:
            continue  # the next one overlaps
        if rank == 0 and number == 1:
            store.set("overlap", "")
        future.wait()
    right = all(bool((t[at * rank : at * (rank + 1)] == 2).all()) for t, at in total)
    kept = len(made._pools)
    made.close()
    return kept, right


def large_kinds(rank, world_size):
    """Programs made so far after each of three rounds of two kinds, of 280 MB together."""
    made, counts, programs = channel(), [], []
    build = channels.program_of
    channels.program_of = lambda *args, **given: programs.append(0) or build(*args, **given)
    for _ in range(3):
        for length in (40_000_000, 30_000_000):
            made.submit(torch.zeros(length), sums(length), draw=0).wait()
        counts.append(len(programs))
    made.close()
    return counts


def overlapping(rank, world_size):
    """Sums of tensors of one kind that travel at the same time, by as many programs as allowed."""
    made = channel()
    tensors = [torch.full((10_000,), float(rank + i)) for i in range(6)]
    futures = [made.submit(t, sums(10_000), draw=0) for t in tensors]
    for future in futures:
        future.wait()
    programs = len(made._executor._prepared)
    made.close()
    at = 5000 * rank
    return [t[at : at + 5000].unique().tolist() for t in tensors], programs


def other_tensors(rank, world_size):
    """Errors of ranks that average different tensors of a length, for the first time and later."""
    order = ("a", "b") if rank == 0 else ("b", "a")
    first = raised_by(hipress.all_reduce, torch.ones(300), "int8_group", name=order[0])
    for name in ("a", "b"):
        hipress.all_reduce(torch.ones(300), "int8_group", name=name)
    later = raised_by(hipress.all_reduce, torch.ones(300), "int8_group", name=order[0])
    for name in ("a", "b"):
        hipress.all_reduce(torch.ones(300), "fp16", name=name)
    summed = raised_by(hipress.all_reduce, torch.ones(300), "fp16", name=order[0])
    shapes = raised_by(hipress.all_reduce, torch.ones((2, 3) if rank else (3, 2)), "int8_group")
    return first, (later, summed), shapes


def later_time_out(rank, world_size):
    """The error of an all_reduce that waits shorter than the one before, in vain."""
    store = compat.job_store()
    hipress.all_reduce(torch.ones(3000), "int8_group", timeout=HANG)
    if rank:
        store.wait(["over"])
        return None
    try:
        return error_of(hipress.all_reduce, torch.ones(3000), "int8_group", timeout=SILENCE)
    finally:
        store.set("over", "")


def threads(rank, world_size):
    """Threads of this process after all_reduces with several codecs: one executor for all."""
    for name in ("none", "int8_group"):
        hipress.all_reduce(torch.ones(3000), name)
    before = len(os.listdir("/proc/self/task"))
    for name in ("int4_group", "onebit_group"):
        hipress.all_reduce(torch.ones(3000), name)
    return len(os.listdir("/proc/self/task")) - before


class Means(torch.nn.Module):
    """Buffers that grow apart between ranks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(40, 50))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(300))


def grown(module, averages, rank, steps):
    """Train so many steps; return what ranks added to the buffers on average."""
    total = torch.zeros(2300)
    for step in range(*steps):
        for each in range(dist.get_world_size()):
            added = values(100 * step + each, 2300)
            total += added / dist.get_world_size()
            if each == rank:
                module.mean += added[:2000].view(40, 50)
                module.scale += added[2000:]
        averages.step()
    return total


def toy(rank, world_size):
    """Averages of buffers by a way in that tests have: buffers, delivered and undelivered values
    against the exact sums, a training that goes on from its state, a report, and errors."""
    module, other = Means(), Means()
    averages = BufferAverages(module, timeout=60.0)
    exact = grown(module, averages, rank, (0, 6))
    state = averages.state_dict()
    other.load_state_dict(module.state_dict())
    again = BufferAverages(other, timeout=60.0)
    again.load_state_dict(state)
    left = averages.undelivered()
    dist.all_reduce(left)
    flat = torch.cat([module.mean.flatten(), module.scale])
    off = (flat + left / world_size - exact).abs().max().item()
    grown(module, averages, rank, (6, 12))
    grown(other, again, rank, (6, 12))
    same = torch.equal(module.mean, other.mean) and torch.equal(module.scale, other.scale)
    error = raised_by(again.load_state_dict, {**state, "codecs": {}})
    report = averages.report()
    averages.detach()
    again.detach()
    return module.mean.tolist(), off, same, error, report
