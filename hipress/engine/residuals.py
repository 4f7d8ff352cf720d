"""Residuals and other codec states: their places, and their moves.

[Note: state] DDP delivers one set of buckets at iteration 0 and another from iteration 1 on, so
state belongs to parameters, never to buckets. With scope "tensor" there is one arena per codec and
side: flat arrays over the parameters of that codec, in the model's order, and a parameter's place
in it never changes. With scope "bucket" a unit is a run of a bucket and its state must be
contiguous in the bucket's order; each bucket has an arena, and when DDP makes new buckets the
values move to the new arena by parameter name. The aggregator's residual of elements whose owner
changes with the buckets is left behind, once, after iteration 0.

An aggregator's arena holds only the elements that this rank owns, in the order of the worker's: see
Spans. With scope "bucket" it holds all, since owners change with the buckets, and may change back.

[Note: undelivered gradient] A state whose fate is "owed" holds gradient that has not been sent. The
average of the ranks' gradients lacks 1/N of a worker's residual, but all of an owner's, which has
been divided by N already; so has a worker's where ranks encode shares of the mean. As a gradient of
one rank an owner's residual therefore counts N times. This is independent of codec, strategy and
buckets, and is what moves when they change: see Engine. A spec's own sums hold gradient back, too
(`owed:`): it moves with the states while the codec stays, and as a gradient to another.

[Note: unused parameters] With find_unused_parameters DDP drops the average of a parameter that no
rank used in a step, and with it the sent part of its residuals. So residuals wait while the input
of their encode is zero: see [Note: deferred feedback] in runtime/deferral.py. With scope "bucket"
this holds for runs of a bucket that are unused as a whole. The momentum of dgc waits with its sum,
as that of an optimizer waits without a gradient. States of codecs that encode zeros as other values
do not wait: signum keeps voting, by its momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch

from casync import strategies
from casync.codec import Codec, one_piece
from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.runtime.deferral import as_torch
from hipress.engine.owned import Spans
from hipress.model.params import Param
from hipress.plan.codecs import flat_names, gradient_units, owed_names, state_of
from hipress.plan.plan import Plan

#: float32, or 16 bits a value: float16, and bfloat16 as the uint16 of its bits; on a device tensors
Floats = npt.NDArray[Any]
WORKER, AGGREGATOR = "worker", "aggregator"
Copied = dict[int, dict[str, dict[str, tuple[Spans, Floats]]]]  # by parameter index, side, name
States = Mapping[tuple[str, str], dict[str, Floats]]


@dataclass(eq=False)
class Arena:
    """State of one codec for some parameters: arrays by side and name. If owners have a codec of
    their own, its state is the aggregator's."""

    codec: str  # of workers
    sides: dict[str, dict[str, Floats]]
    owned: Spans  # elements of the workers' arrays that the aggregator's have


@dataclass(frozen=True)
class ArenaSlice:
    """Arena and first element of a parameter's flat state."""

    arena: Arena
    offset: int


@dataclass
class Residuals:
    """The state of all parameters of a model. `places` is by parameter index."""

    params: Sequence[Param]
    plan: Plan
    #: elements that this rank aggregates, by parameter; None with scope "bucket": buckets decide
    owned: Mapping[int, Spans] | None = field(default_factory=dict)
    memory: Memory = field(default_factory=HostMemory)
    places: dict[int, ArenaSlice] = field(default_factory=dict)

    def place_all(self) -> States:
        """Arenas, one per codec over all its parameters in the model's order (scope "tensor")."""
        states: dict[tuple[str, str], dict[str, Floats]] = {}
        for key in dict.fromkeys(d.codec for d in self.plan.decisions if d.codec is not None):
            if self.stateful(key):
                members = [p.index for p in self.params if self.codec_of(p.index) == key]
                states.update(self.view([self.place(key, members)]))
        return states

    def stateful(self, key: str) -> bool:
        """True if either side of parameters with this codec keeps state."""
        return any(self.codec_at(key, side).states for side in self._sides(key))

    def codec_at(self, key: str, side: str) -> Codec:
        """Codec of this side for parameters whose workers use codec `key`."""
        return self.plan.codecs[key] if side == WORKER else self.plan.down(key)

    def codec_of(self, index: int) -> str | None:
        """Key of a parameter's codec."""
        return self.plan.decisions[index].codec

    def state_scheme(self, index: int) -> str:
        """Text on the way of a parameter, which decides the meaning and the place of its state:
        `ring` keeps at workers what `ps` keeps at aggregators, `exchange` keeps shares of the
        mean, and `hierarchical` keeps a node's state at its leaders."""
        strategy = self.plan.decisions[index].strategy
        if strategies.load(strategy).SPREADS == "nodes":
            strategy = f"{strategy} over {self.plan.topology}"
        return strategy if self.owned is not None else f"{strategy} by buckets"

    def place(self, key: str, indices: Sequence[int]) -> Arena:
        """A new arena that holds `indices` in this order; their earlier values move in."""
        begins, owned = [0, *accumulate(self.params[i].numel for i in indices)], self.owned
        if owned is None:
            spans = Spans([(0, begins[-1])])
        else:
            runs = {at: owned[i].runs for i, at in zip(indices, begins, strict=False) if i in owned}
            spans = Spans((at + first, many) for at, some in runs.items() for first, many in some)
        sizes = {WORKER: begins[-1], AGGREGATOR: len(spans)}
        sides = {side: self._zeros(key, side, sizes[side]) for side in self._sides(key)}
        arena = Arena(key, sides, spans)
        for index, offset in zip(indices, begins, strict=False):
            moved = self.copy([index]) if index in self.places else {}
            self.places[index] = ArenaSlice(arena, offset)
            self.put_back(moved)
        return arena

    @staticmethod
    def view(arenas: Iterable[Arena]) -> dict[tuple[str, str], dict[str, Floats]]:
        """The arenas in the form of the executor's `states`."""
        return {(a.codec, side): arrays for a in arenas for side, arrays in a.sides.items()}

    def pieces(self, index: int) -> dict[str, dict[str, Floats]]:
        """Views of a parameter's state: side -> name -> flat, the values of `spans`."""
        place = self.places[index]
        arena, stop = place.arena, place.offset + self.params[index].numel
        ranges = {
            WORKER: (place.offset, stop),
            AGGREGATOR: (arena.owned.before(place.offset), arena.owned.before(stop)),
        }
        return {
            side: {
                name: array[slice(*ranges[side])] if name in flat else array[index : index + 1]
                for name, array in arrays.items()
            }
            for side, arrays in arena.sides.items()
            for flat in (flat_names(self.codec_at(arena.codec, side)),)
        }

    def spans(self, index: int, side: str, name: str) -> Spans:
        """Elements of a parameter whose values `pieces` gives; one if the state is per tensor."""
        place, numel = self.places[index], self.params[index].numel
        if name not in flat_names(self.codec_at(place.arena.codec, side)):
            return Spans([(0, 1)])
        if side == WORKER:
            return Spans([(0, numel)])
        return place.arena.owned.within(place.offset, numel)

    def whole(self, index: int) -> dict[str, dict[str, torch.Tensor]]:
        """A parameter's state as flat tensors [numel], or [1] if per tensor; zero for elements of
        other ranks' aggregators. Zeros if it has no place yet (scope "bucket", before a step)."""
        if index not in self.places:
            apart = replace(self, places={}, memory=HostMemory())
            apart.place(str(self.codec_of(index)), [index])
            return apart.whole(index)
        codec, numel = self.places[index].arena.codec, self.params[index].numel
        whole: dict[str, dict[str, torch.Tensor]] = {}
        for side, arrays in self.pieces(index).items():
            flat = flat_names(self.codec_at(codec, side))
            whole[side] = {
                name: self.spans(index, side, name).spread(
                    as_torch(array), numel if name in flat else 1
                )
                for name, array in arrays.items()
            }
        return whole

    def undelivered(self, index: int, *, sums: bool = True) -> torch.Tensor | None:
        """The gradient of a parameter that this rank has not delivered yet; None if its codec
        holds nothing back. sums: with what states of a codec's own hold back (`owed:` of a spec).

        Added to this rank's gradient it adds to the average what the codecs' states would have
        added: see [Note: undelivered gradient]. Flat float32 [numel] in bucket order, in the memory
        of states.
        """
        if index not in self.places:
            return None
        key, strategy = self.places[index].arena.codec, self.plan.decisions[index].strategy
        ranks = self.plan.topology.world_size
        weights = {
            side: gradient_weights(self.codec_at(key, side), side, strategy, ranks, sums=sums)
            for side in self._sides(key)
        }
        if not any(weights.values()):
            return None
        total = self.memory.zeros(self.params[index].numel, torch.float32)
        for side, arrays in self.pieces(index).items():
            for name, weight in weights[side].items():
                spans, values = self.spans(index, side, name), as_torch(arrays[name])
                for here, there in spans.pairs(Spans([(0, len(total))])):
                    total[there].add_(values[here], alpha=weight)
        return total

    def copy(self, indices: Iterable[int]) -> Copied:
        """A copy of the state of these parameters, for `put_back`."""
        return {
            index: {
                side: {
                    name: (self.spans(index, side, name), _copy(array))
                    for name, array in arrays.items()
                }
                for side, arrays in (self.pieces(index) if index in self.places else {}).items()
            }
            for index in indices
        }

    def put_back(self, copied: Copied) -> None:
        """Restore copied states; elements that had none become zero."""
        for index in copied.keys() & self.places.keys():
            for side, arrays in self.pieces(index).items():
                for name, array in arrays.items():
                    before, values = copied[index].get(side, {}).get(name, (Spans(), array))
                    spans = self.spans(index, side, name)
                    if spans.runs != before.runs:
                        array[:] = 0
                    for here, there in spans.pairs(before):
                        array[here] = values[there]

    def lay_out(self, old: Param, new: Param) -> None:
        """Move a parameter's state to a new layout of its elements."""
        if old.index not in self.places:
            return
        pieces = self.pieces(old.index)
        for side, arrays in self.whole(old.index).items():
            for name, values in arrays.items():
                if values.numel() == old.numel:
                    moved = in_layout(in_shape(values, old), new)
                    spans = self.spans(old.index, side, name)
                    as_torch(pieces[side][name]).copy_(spans.of(moved))

    def _zeros(self, key: str, side: str, total: int) -> dict[str, Floats]:
        return state_of(self.codec_at(key, side), self.memory, total, len(self.params))

    def _sides(self, key: str) -> tuple[str, ...]:
        """Sides with state: aggregators need state only if they encode in addition to workers."""
        used = {d.strategy for d in self.plan.decisions if d.codec == key}
        again = self.plan.down(key).reencodes and any(strategies.load(s).TWO_WAY for s in used)
        return (WORKER, AGGREGATOR) if again else (WORKER,)


def gradient_weights(
    codec: Codec, side: str, strategy: str, ranks: int, *, sums: bool = True
) -> dict[str, float]:
    """Factors by which the states of a side's codec count as gradient of one rank, by name: see
    [Note: undelivered gradient]. sums: of states of the codec's own, too."""
    shared = side == AGGREGATOR or strategies.encodes_shares(strategy, codec)
    units = gradient_units(codec, sums=sums)
    return {name: unit * (ranks if shared else 1) for name, unit in units.items()}


def undelivered(
    states: Mapping[str, Mapping[str, Floats]],
    codecs: Mapping[str, Codec],
    strategy: str,
    ranks: int,
) -> torch.Tensor | None:
    """The gradient of one rank that whole states hold back: flat float32; None for nothing.

    states: arrays by side and name; codecs: by side.
    """
    total: torch.Tensor | None = None
    for side, arrays in states.items():
        for name, weight in gradient_weights(codecs[side], side, strategy, ranks).items():
            values = as_torch(arrays[name]).float()
            total = torch.zeros_like(values) if total is None else total
            total.add_(values, alpha=weight)
    return total


def in_shape(flat: torch.Tensor, param: Param) -> torch.Tensor:
    """A parameter's flat values in bucket order, viewed in its shape."""
    return flat.as_strided(param.shape, param.layout)


def in_layout(values: torch.Tensor, param: Param) -> torch.Tensor:
    """The inverse of `in_shape`: a flat copy."""
    laid = torch.empty_strided(param.shape, param.layout, dtype=values.dtype, device=values.device)
    return laid.copy_(values).as_strided((param.numel,), (1,))


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def deferrable_states(codec: Codec, memory: Memory | None = None) -> tuple[str, ...]:
    """Names of the states that wait while a parameter is unused. See [Note: unused parameters].

    memory: the memory that the codec works in; by default the host's.
    """
    if codec.difference is not None:
        return ()  # references follow a gradient of zeros, with or without its average
    names, owed = flat_names(codec), owed_names(codec)
    rounds = bool(codec.rounds)  # some of their states are shared by ranks
    if names <= owed or rounds or not _silent(codec, memory or HostMemory()):
        names &= owed
    return tuple(sorted(names))


def _silent(codec: Codec, memory: Memory) -> bool:
    """True if the codec, without state, sends and keeps only zeros for zeros."""
    count, stream, done = max(64, codec.align), memory.caller(), memory.event()
    table, at = one_piece(count)
    x = memory.zeros(count, torch.float32)
    values, state = memory.array(x), state_of(codec, memory, count)
    out = memory.array(memory.zeros(codec.payload_bytes(count), torch.uint8))

    def work() -> None:
        used = codec.encode_batch(values, table, out, at, state=state)
        codec.decode_batch(out, table, at, used, values)

    stream.run(work)
    stream.record(done)
    done.wait()
    return not x.cpu().any() and not any(state[name].any() for name in flat_names(codec))
