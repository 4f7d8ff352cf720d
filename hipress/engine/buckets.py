"""From the parameters of a bucket to a program for the executor.

[Note: differences] With `feedback: difference` (EF21, DIANA) a rank sends the compressed
difference of its gradient from a reference, which takes up a share of what was sent. All ranks hold
the mean of all references, and add it to the mean of the decoded differences. It takes up the same
share of that, and so stays the mean of references, up to rounding in float32. This needs every rank
to decode every payload. If a gradient is not finite, its rank's reference stays and others move,
and no rank can tell their mean: then mean and references become zero, on all ranks alike.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from casync.codec import Codec
from casync.graph.graph import Program
from casync.graph.shares import share_out
from casync.memory import Memory
from casync.raw import RAW
from casync.runtime.deferral import as_torch
from hipress.channel.exchange import Piece, owned_parts, parts_of, program_of
from hipress.channel.states import WORKER, Arena, Arrays, Runs, arrays_of
from hipress.choose.plan import Plan
from hipress.codecs import MEAN, REFERENCE
from hipress.engine.residuals import Residuals
from hipress.model.params import Param
from hipress.model.rounding import add_product
from hipress.options import Options

__all__ = ["Differences"]

State = Mapping[str, Any]  # arrays of a codec's side, by name


@dataclass(frozen=True)
class Differences:
    """Elements of a bucket whose payloads are of differences."""

    codec: str
    share: float  # of a decoded difference, taken up by references
    start: int  # first element in the bucket
    length: int
    state: int  # first element in the states

    def add_mean(self, bucket: torch.Tensor, state: State) -> None:
        """Add the mean of references to the mean of differences, in place; then update the mean."""
        piece = bucket[self.start : self.start + self.length]
        own = slice(self.state, self.state + self.length)
        mean, reference = (as_torch(state[name][own]) for name in (MEAN, REFERENCE))
        total = mean + piece
        if self.share == 1:
            mean.copy_(total)
        else:
            add_product(mean, piece, self.share)
        piece.copy_(total)
        wrong = torch.linalg.vector_norm(total, torch.inf).isfinite().logical_not()
        if wrong.is_cuda or wrong:  # the host of a device does not wait
            mean.masked_fill_(wrong, 0)
            reference.masked_fill_(wrong, 0)


@dataclass(frozen=True)
class Unit:
    """Parameters compressed as one: a single one, or a run of a bucket with scope "bucket"."""

    indices: tuple[int, ...]  # parameters, in the bucket's order
    start: int  # first element in the bucket
    piece: Piece


@dataclass(eq=False)
class BucketPlan:
    """The program and states of one bucket."""

    program: Program
    states: Arrays
    units: tuple[Unit, ...]  # () if all is summed natively, in its own type
    compressed: int  # compressed elements
    arenas: tuple[Arena, ...] = ()  # of this bucket alone; empty with scope "tensor"
    differences: tuple[Differences, ...] = ()

    def add_means(self, bucket: torch.Tensor, states: Arrays) -> torch.Tensor:
        """Add the means of references to averaged differences, in place; returns the bucket.
        states: those of the run."""
        for each in self.differences:
            each.add_mean(bucket, states[each.codec, WORKER])
        return bucket


class BucketPlans:
    """Makes each bucket's BucketPlan once. DDP rebuilds its buckets after step 0."""

    def __init__(
        self,
        params: Sequence[Param],
        plan: Plan,
        options: Options,
        rank: int,
        memory: Memory | None = None,
        *,
        rotates: bool = True,
    ) -> None:
        """memory: of states; by default the host's. rotates: see casync.build."""
        self._rotates = rotates
        self._params, self.plan, self.hosted = params, plan, plan.hosted
        self._rank, self._topology = rank, plan.topology
        self._merges = options.scope != "tensor"
        shares = share_out([p.numel for p in params], plan.topology.world_size, plan.least)
        # merged runs have no shares: they are spread as they are
        named = zip(params, shares, strict=True) if not self._merges else ()
        self._shares = {param.name: mine for param, mine in named}
        self.residuals = Residuals(params, plan, memory=memory)
        self.residuals.owned = None if self._merges else self._owned_spans()
        self._arenas = [] if self._merges else self.residuals.place_all()
        self._plans: dict[tuple[int, ...], BucketPlan | None] = {}
        self._raw: dict[tuple[int, ...], BucketPlan] = {}

    def plan_for(self, indices: tuple[int, ...]) -> BucketPlan | None:
        """The BucketPlan for a bucket of these parameters; None if none of them is compressed."""
        if indices not in self._plans:
            self._drop_rebuilt(indices)
            self._plans[indices] = self._make(indices)
        plan = self._plans[indices]
        if plan is not None and self._merges:
            self._take_state(plan)
        return plan

    def native(self, indices: Sequence[int]) -> bool:
        """True if none of these parameters is compressed."""
        return all(self.plan.decisions[i].codec is None for i in indices)

    def raw(self, indices: tuple[int, ...]) -> BucketPlan:
        """A native all-reduce of a bucket of these parameters by an executor's own transport. Each
        bucket has its own: a program has one type, and its graph the memory of one bucket."""
        if indices not in self._raw:
            elements = sum(self._params[index].reals for index in indices)
            program = program_of(
                [Piece(elements)], self._topology, {}, self._rank, rotates=self._rotates
            )
            self._raw[indices] = BucketPlan(program, {}, (), 0)
        return self._raw[indices]

    def adopt(self, before: BucketPlans) -> set[int]:
        """Take over the states of parameters whose codecs differ in parameters alone; return these
        parameters' indices. The others' states stay with `before`."""
        other = before.residuals.memory.device != self.residuals.memory.device
        other = other or before.plan.least != self.plan.least
        if before._merges != self._merges or other:  # owners or arrays differ
            return set()
        same = {index for index in before.residuals.places if self._same_state(before.plan, index)}
        copied = before.residuals.copy(same)
        for index in same - self.residuals.places.keys():
            self.residuals.place(str(self.plan.decisions[index].codec), [index])
        self.residuals.put_back(copied)
        return same

    def _same_state(self, before: Plan, index: int) -> bool:
        one, other = before.decisions[index], self.plan.decisions[index]
        if one.codec is None or other.codec is None:
            return False
        codecs = before.codecs[one.codec], self.plan.codecs[other.codec]
        return (
            (one.strategy, one.partitions) == (other.strategy, other.partitions)
            and codecs[0].name == codecs[1].name
            and not codecs[0].rounds  # their factors have other shapes
            and _types(codecs[0]) == _types(codecs[1])
        )

    def pieces(self, indices: Sequence[int], buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pieces of a bucket, by parameter."""
        return torch.split(buffer, [self._params[index].reals for index in indices])

    def undelivered(self, indices: Sequence[int]) -> torch.Tensor:
        """The undelivered gradients of a bucket's parameters, flat float32 in its order; zeros of
        those that have none."""
        elements = sum(self._params[index].reals for index in indices)
        whole = self.residuals.memory.zeros(elements, torch.float32)
        for index, piece in zip(indices, self.pieces(indices, whole), strict=True):
            gradient = self.residuals.undelivered(index)
            if gradient is not None:
                piece.copy_(gradient)
        return whole

    def _drop_rebuilt(self, indices: Sequence[int]) -> None:
        """Drop the plans of these parameters' earlier buckets, which DDP has rebuilt, with their
        programs and the executor's buffers."""
        moved = set(indices)
        self._plans = {old: w for old, w in self._plans.items() if moved.isdisjoint(old)}
        self._raw = {old: w for old, w in self._raw.items() if moved.isdisjoint(old)}

    def _owned_spans(self) -> dict[int, Runs]:
        """Elements that this rank aggregates, by parameter, whatever their buckets."""
        owned: dict[int, Runs] = {}
        for param in self._params:
            pieces = [replace(unit.piece, state=0) for unit in self._units((param.index,))]
            parts = parts_of(pieces, self._topology, self.plan.codecs)
            mine = owned_parts(parts, self._rank)
            runs = [(row[3], row[1]) for part in mine for row in part.rows]
            if runs:
                owned[param.index] = Runs(runs)
        return owned

    def _make(self, indices: tuple[int, ...]) -> BucketPlan | None:
        if self.native(indices):
            return None
        units = self._units(indices)
        compressed = sum(unit.piece.length for unit in units if unit.piece.codec != RAW)
        program = program_of(
            [unit.piece for unit in units], self._topology, self.plan.codecs, self._rank,
            rotates=self._rotates, owned={each.codec: each.owned for each in self._arenas},
        )  # fmt: skip
        differences = tuple(self._differences(units))
        return BucketPlan(
            program, arrays_of(self._arenas), units, compressed, differences=differences
        )

    def _differences(self, units: Sequence[Unit]) -> Iterator[Differences]:
        """Units whose payloads are of differences."""
        for unit in units:
            piece, key = unit.piece, unit.piece.codec
            share = None if key == RAW else self.plan.codecs[key].difference
            if share is not None:
                yield Differences(key, share, unit.start, piece.length, piece.state)

    def _units(self, indices: Sequence[int]) -> tuple[Unit, ...]:
        """Units in bucket order; with scope "bucket" neighbours of one codec are joined.

        Parameters without elements are left out: they send nothing, and would part neighbours.
        """
        indices = [i for i in indices if self._params[i].numel]
        units, start, states = [], 0, Counter[str]()
        for members in self._runs(indices):
            piece = self._piece(members, states)
            units.append(Unit(members, start, piece))
            start += piece.length
        return tuple(units)

    def _runs(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        if not self._merges:
            return [(i,) for i in indices]
        groups = itertools.groupby(indices, key=lambda i: self.plan.decisions[i].codec)
        return [tuple(members) for _, members in groups]

    def _piece(self, members: Sequence[int], states: Counter[str]) -> Piece:
        """The piece of a unit. states: elements of earlier units of its bucket, by codec: with
        scope "bucket" its own arenas hold its units in order, see `_take_state`."""
        first = self._params[members[0]]
        length, decision = (
            sum(self._params[i].numel for i in members),
            self.plan.decisions[first.index],
        )
        key = RAW if decision.codec is None else decision.codec
        state = 0
        if self._merges:
            state, states[key] = states[key], states[key] + length
        elif first.index in self.residuals.places:
            state = self.residuals.places[first.index].offset
        named = Piece(
            length, key, shares=self._shares.get(first.name), partitions=1,
            number=first.index, state=state, name=first.name,
        )  # fmt: skip
        if decision.codec is None:
            return named
        cut = None if len(members) > 1 else decision.partitions
        down = self.plan.downs.get(key)
        return replace(named, strategy=decision.strategy, partitions=cut, down=down)

    def _take_state(self, plan: BucketPlan) -> None:
        """Make this bucket's arenas hold its parameters' state; see [Note: state]."""
        members: dict[str, list[int]] = {}
        for unit in plan.units:
            key = unit.piece.codec
            if key != RAW and self.residuals.stateful(key):
                members.setdefault(key, []).extend(unit.indices)
        places = self.residuals.places
        current = {a.codec: a for a in plan.arenas}
        wanted = [(key, index) for key, indices in members.items() for index in indices]
        if all(i in places and places[i].arena is current.get(key) for key, i in wanted):
            return
        plan.arenas = tuple(self.residuals.place(key, all_) for key, all_ in members.items())
        plan.states = arrays_of(plan.arenas)


def _types(codec: Codec) -> dict[str, str]:
    """Types of a codec's states, by name: they differ with residual="bfloat16"."""
    return {state.name: state.dtype for state in codec.states}
