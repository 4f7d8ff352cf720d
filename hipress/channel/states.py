"""States of codecs by name, and what they hold back.

States of a codec and of its owners' are flat arrays over several tensors, an arena, of which each
tensor has a slice. An aggregator's arrays hold only the elements that this rank owns, in the order
of the worker's: see Runs.

[Note: undelivered gradient] A state whose fate is "owed" holds gradient that has not been sent. The
average of the ranks' gradients lacks 1/N of a worker's residual, but all of an owner's, which has
been divided by N already; so has a worker's where ranks encode shares of the mean. As a gradient of
one rank an owner's residual therefore counts N times. This is independent of codec, strategy and
buckets, and is what moves when they change. A spec's own sums hold gradient back, too (`owed:`): it
moves with the states while the codec stays, and as a gradient to another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

import numpy.typing as npt
import torch

from casync import strategies
from casync.codec import Codec
from casync.memory import Memory
from casync.runtime.deferral import as_torch
from hipress.codecs import flat_names, gradient_units, state_of

__all__ = [
    "AGGREGATOR",
    "WORKER",
    "Arena",
    "Copied",
    "Floats",
    "Runs",
    "Slice",
    "States",
    "gradient_weights",
]


class Runs:
    """Runs of elements, in order and without overlaps, whose values lie one behind another."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """runs: first element and length of each; neighbours are joined."""
        self.runs: list[tuple[int, int]] = []
        for first, length in sorted(runs):
            if self.runs and sum(self.runs[-1]) == first:
                first, length = self.runs[-1][0], self.runs.pop()[1] + length
            if length:
                self.runs.append((first, length))
        self._firsts = [first for first, _ in self.runs]
        self._before = [0, *accumulate(length for _, length in self.runs)]

    def __len__(self) -> int:
        return self._before[-1]

    def before(self, element: int) -> int:
        """Number of elements of the spans before this one: its place among the values."""
        number = bisect_right(self._firsts, element) - 1
        if number < 0:
            return 0
        first, length = self.runs[number]
        return self._before[number] + min(element - first, length)

    def within(self, first: int, length: int) -> Runs:
        """The part of the spans in a range of elements, counted from its first."""
        start = max(0, bisect_right(self._firsts, first) - 1)
        runs, end = list[tuple[int, int]](), first + length
        for begin, many in self.runs[start:]:
            if begin >= end:
                break
            low, high = max(begin, first), min(begin + many, end)
            if low < high:
                runs.append((low - first, high - low))
        return Runs(runs)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The spans' values of a flat tensor of all elements."""
        return torch.cat([flat[:0], *(flat[first : first + many] for first, many in self.runs)])

    def spread(self, values: torch.Tensor, elements: int) -> torch.Tensor:
        """The inverse of `of`: `elements` values, zero where there are none; the same tensor if
        there are all."""
        if len(self) == elements:
            return values
        flat = values.new_zeros(elements)
        for first, many in self.runs:
            at = self.before(first)
            flat[first : first + many] = values[at : at + many]
        return flat

    def pairs(self, other: Runs) -> Iterator[tuple[slice, slice]]:
        """Places among these values, and among another's, of elements that both have."""
        for first, length in self.runs:
            for begin, many in other.within(first, length).runs:
                here, there = self.before(first + begin), other.before(first + begin)
                yield slice(here, here + many), slice(there, there + many)


#: float32, or 16 bits a value: float16, and bfloat16 as the uint16 of its bits; on a device tensors
Floats: TypeAlias = npt.NDArray[Any]
WORKER, AGGREGATOR = "worker", "aggregator"
Arrays: TypeAlias = Mapping[tuple[str, str], dict[str, Floats]]  # by codec and side, and name
#: by side and name, with the elements that the values are of
Copied: TypeAlias = dict[str, dict[str, tuple[Runs, Floats]]]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Slice(Generic[Name]):
    """A tensor's part of an arena."""

    name: Name
    length: int  # elements
    strategy: str  # by which its payloads travel
    number: int  # of its value in states that have one a tensor


@dataclass(eq=False)
class Arena:
    """States of a codec, and of its owners', for some tensors: arrays by side and name."""

    codec: str  # key of workers' codec
    codecs: Mapping[str, Codec]  # by side
    sides: dict[str, dict[str, Floats]]
    owned: Runs  # elements of the workers' arrays that the aggregator's have

    @property
    def arrays(self) -> Arrays:
        """The arrays as `Channel.submit` takes them."""
        return {(self.codec, side): arrays for side, arrays in self.sides.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, with the memory that owners have not touched."""
        return sum(as_torch(a).nbytes for arrays in self.sides.values() for a in arrays.values())

    def copy(self) -> dict[str, dict[str, Floats]]:
        """Copies of all arrays, by side and name."""
        return {
            side: {name: _copy(array) for name, array in arrays.items()}
            for side, arrays in self.sides.items()
        }

    def take(self, copied: Mapping[str, Mapping[str, Floats]]) -> None:
        """Have these copies in place of the arrays, into which a task that was broken off may still
        write."""
        for side, arrays in copied.items():
            self.sides[side].update(arrays)


@dataclass(frozen=True)
class _Place(Generic[Name]):
    """An arena, and the first element of a tensor in it."""

    arena: Arena
    offset: int  # first element in the workers' arrays
    slice: Slice[Name]


class States(Generic[Name]):
    """States by name of a tensor: a parameter's index or name."""

    def __init__(self, ranks: int, memory: Memory) -> None:
        """ranks: that average. memory: of the arrays."""
        self.ranks, self.memory = ranks, memory
        self.places: dict[Name, _Place[Name]] = {}

    def allocate(
        self,
        key: str,
        codecs: Mapping[str, Codec],
        slices: Sequence[Slice[Name]],
        *,
        owned: Runs | None = None,
        tensors: int | None = None,
    ) -> Arena:
        """A new arena that holds the slices in this order; their earlier values move in.

        key: of the workers' codec. codecs: by side that keeps states. owned: elements that this
        rank aggregates, by default all. tensors: values of states with one a tensor, by default one
        a slice.
        """
        begins = [0, *accumulate(each.length for each in slices)]
        spans = Runs([(0, begins[-1])]) if owned is None else owned
        sizes = {WORKER: begins[-1], AGGREGATOR: len(spans)}
        count = len(slices) if tensors is None else tensors
        sides = {
            side: state_of(codec, self.memory, sizes[side], count) for side, codec in codecs.items()
        }
        arena = Arena(key, codecs, sides, spans)
        for each, offset in zip(slices, begins, strict=False):
            moved = self.copy([each.name]) if each.name in self.places else {}
            self.places[each.name] = _Place(arena, offset, each)
            self.put_back(moved)
        return arena

    def arrays(self, name: Name) -> dict[str, dict[str, Floats]]:
        """Views of a tensor's states: side -> name -> flat, the values of `spans`."""
        place = self.places[name]
        arena, number = place.arena, place.slice.number
        stop = place.offset + place.slice.length
        ranges = {
            WORKER: slice(place.offset, stop),
            AGGREGATOR: slice(arena.owned.before(place.offset), arena.owned.before(stop)),
        }
        return {
            side: {
                each: array[ranges[side]] if each in flat else array[number : number + 1]
                for each, array in arrays.items()
            }
            for side, arrays in arena.sides.items()
            for flat in (flat_names(arena.codecs[side]),)
        }

    def spans(self, name: Name, side: str, state: str) -> Runs:
        """Elements of a tensor whose values `arrays` gives; one if the state is per tensor."""
        place = self.places[name]
        if state not in flat_names(place.arena.codecs[side]):
            return Runs([(0, 1)])
        if side == WORKER:
            return Runs([(0, place.slice.length)])
        return place.arena.owned.within(place.offset, place.slice.length)

    def shapes(self, name: Name) -> dict[str, dict[str, tuple[int]]]:
        """Shapes of the tensors of `whole`."""
        place = self.places[name]
        return {
            side: {
                each: (place.slice.length if each in flat_names(codec) else 1,)
                for each in place.arena.sides[side]
            }
            for side, codec in place.arena.codecs.items()
        }

    def whole(self, name: Name) -> dict[str, dict[str, torch.Tensor]]:
        """A tensor's states as flat tensors of its length, or [1] if per tensor; zero for elements
        of other ranks' aggregators."""
        place = self.places[name]
        whole: dict[str, dict[str, torch.Tensor]] = {}
        for side, arrays in self.arrays(name).items():
            flat = flat_names(place.arena.codecs[side])
            whole[side] = {
                state: self.spans(name, side, state).spread(
                    as_torch(array), place.slice.length if state in flat else 1
                )
                for state, array in arrays.items()
            }
        return whole

    def undelivered(self, name: Name, *, sums: bool = True) -> torch.Tensor | None:
        """The gradient of a tensor that this rank has not delivered yet; None if its codec holds
        nothing back. sums: with what states of a codec's own hold back (`owed:` of a spec).

        Added to this rank's gradient it adds to the average what the codecs' states would have
        added: see [Note: undelivered gradient]. Flat float32, in the memory of states.
        """
        place = self.places.get(name)
        if place is None:
            return None
        weights = {
            side: gradient_weights(codec, side, place.slice.strategy, self.ranks, sums=sums)
            for side, codec in place.arena.codecs.items()
        }
        if not any(weights.values()):
            return None
        total = self.memory.zeros(place.slice.length, torch.float32)
        for side, arrays in self.arrays(name).items():
            for state, weight in weights[side].items():
                spans, values = self.spans(name, side, state), as_torch(arrays[state])
                for here, there in spans.pairs(Runs([(0, len(total))])):
                    total[there].add_(values[here], alpha=weight)
        return total

    def copy(self, names: Iterable[Name]) -> dict[Name, Copied]:
        """Copies of the states of these tensors, for `put_back`."""
        return {
            name: {
                side: {
                    state: (self.spans(name, side, state), _copy(array))
                    for state, array in arrays.items()
                }
                for side, arrays in (self.arrays(name) if name in self.places else {}).items()
            }
            for name in names
        }

    def put_back(self, copied: Mapping[Name, Copied]) -> None:
        """Restore copied states; elements that had none become zero."""
        for name in copied.keys() & self.places.keys():
            for side, arrays in self.arrays(name).items():
                for state, array in arrays.items():
                    before, values = copied[name].get(side, {}).get(state, (Runs(), array))
                    spans = self.spans(name, side, state)
                    if spans.runs != before.runs:
                        array[:] = 0
                    for here, there in spans.pairs(before):
                        array[here] = values[there]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(arena.nbytes for arena in {place.arena for place in self.places.values()})

    def export(self) -> dict[Name, dict[str, dict[str, torch.Tensor]]]:
        """Copies of all states on the host: flat tensors by name, side and state."""
        return {
            name: {
                side: {state: values.to("cpu", copy=True) for state, values in arrays.items()}
                for side, arrays in self.whole(name).items()
            }
            for name in self.places
        }

    def restore(
        self, saved: Mapping[Name, Mapping[str, Mapping[str, torch.Tensor]]] = MappingProxyType({})
    ) -> None:
        """Load what `export` returned, in the types that states have now; states that are not there
        become zero, as at the start."""
        for name in self.places:
            for side, arrays in self.arrays(name).items():
                for state, array in arrays.items():
                    values = saved.get(name, {}).get(side, {}).get(state)
                    if values is None:
                        as_torch(array).zero_()
                    else:
                        spans = self.spans(name, side, state)
                        _fill(as_torch(array), spans.of(values.reshape(-1)))


def _fill(array: torch.Tensor, values: torch.Tensor) -> None:
    """Copy saved values, rounded or exact, in the type of the array, and finite."""
    flat = values.cpu().float()
    if array.dtype != torch.float32:
        most = torch.finfo(array.dtype).max
        flat = flat.clamp(-most, most)
    array.copy_(flat)


def sides_of(codec: Codec, owner: Codec, ways: Iterable[str]) -> dict[str, Codec]:
    """Codecs by side that keeps state: aggregators do if they encode in addition to workers, or
    alone. codec: of workers. ways: strategies by which it is used."""
    used = [strategies.load(way) for way in ways]
    if used and all(each.RESULT == "owner's" for each in used):
        return {AGGREGATOR: owner}
    again = owner.reencodes and any(each.TWO_WAY for each in used)
    return {WORKER: codec, AGGREGATOR: owner} if again else {WORKER: codec}


def arrays_of(arenas: Iterable[Arena]) -> Arrays:
    """The arrays of arenas as the executor takes them."""
    return {key: arrays for arena in arenas for key, arrays in arena.arrays.items()}


def gradient_weights(
    codec: Codec, side: str, strategy: str, ranks: int, *, sums: bool = True
) -> dict[str, float]:
    """Factors by which the states of a side's codec count as gradient of one rank, by name: see
    [Note: undelivered gradient]. sums: of states of the codec's own, too."""
    shared = side == AGGREGATOR or strategies.encodes_shares(strategy, codec)
    units = gradient_units(codec, sums=sums)
    return {name: unit * (ranks if shared else 1) for name, unit in units.items()}


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()
