"""Selected lanes of a walk, and lanes that take the next element of a spread array.

A lane's place is the number of selected lanes before it: before its tile, which an earlier kernel
counted, and within the tile, by ballots of the team.
"""

from __future__ import annotations

from typing import Any

from compll.ir.tile import Compact, Value, Walk, count_of
from compll.passes.fuse import Loop


def counted(walk: Walk) -> dict[str, Value]:
    """Conditions whose lanes must be counted before a walk, by their names."""
    selected = {
        f"{kind}_{one.selection}": condition
        for one in walk.compacts
        for kind, condition in (("always", one.always), ("first", one.first))
        if condition is not None
    }
    return selected | {f"spread{k}": v.args[0] for k, v in enumerate(walk.spreads)}


class SelectedLanes:
    """Selected lanes of `walk` (a WalkKernel)."""

    def __init__(self, walk: Any) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        self.counted = counted(walk.walk)
        self.spreads = walk.walk.spreads

    def open(self) -> None:
        """Declarations before all loops."""
        for name in self.counted:
            self.body.add(f"i64 next_{name};")

    def begin(self) -> None:
        """Set the number of selected lanes before the tile."""
        grid = self.walk.region.grid
        for name in self.counted:
            before = self.body.memory(f"before_{name}", "uint32", grid)
            blocks = f"(i64)blocks_{name}[blockIdx.x]"
            self.body.add(f"next_{name} = m ? {blocks} + {before}[t] : 0;")

    def row(self, loop: Loop) -> None:
        """Find the places of a row's selected lanes."""
        for one in loop.compacts:
            self.compact_row(one)
        needed = {id(v) for v in self.walk.order(loop)}
        for k, v in enumerate(self.spreads):
            if id(v) in needed:
                self.hits(f"spread{k}", v.args[0])
                self.ranks(f"spread{k}")

    def hits(self, name: str, condition: Value) -> None:
        """Declare, for four lanes, if a condition holds for each."""
        self.body.add(f"bool is_{name}[4];")
        with self.walk.each_of_row(self.walk.order(Loop(0, 0, folds=[count_of(condition)]))):
            self.body.add(f"is_{name}[j] = i < m && {self.walk.named(condition)};")

    def ranks(self, name: str) -> None:
        """Declare the places of four lanes' hits."""
        self.body.add(f"i64 rank_{name}[4];")
        self.body.add(f"ranks<{self.shape.team}>(is_{name}, next_{name}, rank_{name});")

    def compact_row(self, one: Compact) -> None:
        """Append a row's selected lanes. Most rows of a sparse selection have none."""
        b, s = self.body, one.selection
        found = []
        for name, condition in ((f"always_{s}", one.always), (f"first_{s}", one.first)):
            if condition is not None:
                self.hits(name, condition)
                found.append(name)
        b.add(f"bool is_{s}[4] = {{}};")
        some = " || ".join(f"is_{name}[{j}]" for name in found for j in range(4))
        with b.block(f"if (__any_sync(FULL, {some}))"):
            for name in found:
                self.ranks(name)
            with self.walk.each_of_row(self.walk.order(Loop(0, 0, compacts=[one]))):
                self.append(one)

    def append(self, one: Compact) -> None:
        """Append the current lane if it is selected."""
        b, s = self.body, one.selection
        taken, place = [], []
        if one.always is not None:
            taken, place = [f"is_always_{s}[j]"], [f"rank_always_{s}[j]"]
        if one.first is not None:
            limit = b.value(one.limit)
            taken.append(f"(is_first_{s}[j] && rank_first_{s}[j] < {limit})")
            place.append(f"op_min(rank_first_{s}[j], {limit})")
        b.add(f"is_{s}[j] = {' || '.join(taken)};")
        b.add(f"const i64 rank = {' + '.join(place)};")
        for array, value in one.parts:
            to = f"{self.walk.arrays.pointer(array)}[rank]"
            b.add(f"if (is_{s}[j]) {to} = {self.walk.named(value)};")

    def lane(self, v: Value) -> str:
        """True for a selected lane; for a spread, the value that the lane takes."""
        if v.op == "selected":
            return f"is_{v.attr}[j]"
        k = [id(one) for one in self.spreads].index(id(v))
        return f"is_spread{k}[j] ? {self.element(v, f'rank_spread{k}[j]')} : 0.0f"

    def element(self, v: Value, place: str) -> str:
        """An element of the spread array."""
        array = self.walk.arrays.pointer(v.attr)
        if v.attr.received:
            return f"load_float32({array} + 4 * {place})"
        return f"{array}[{place}]"
