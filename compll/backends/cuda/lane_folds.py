"""Folds of a tile's lanes: a thread's own first, then those of its team."""

from __future__ import annotations

from typing import Any

from compll.ir.tile import Value
from compll.numerics.numbers import lane_count

#: start value of a fold other than a sum
START = {"max": "-2147483647", "min": "2147483647", "count": "0"}


class Folds:
    """Folds of the loops of `walk` (a WalkKernel)."""

    def __init__(self, walk: Any) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        #: true if rows are lanes, too, and are folded first: see [Note: order of sums]
        self.few = self.shape.row < lane_count(self.shape.tile)
        self.names: dict[int, str] = {}

    def open(self, folds: list[Value]) -> None:
        """Start values, before the loop."""
        for f in folds:
            name = self.names[id(f)] = self.body.name("a")
            if f.attr == "sum":
                self.body.add(f"float {name}[{4 * self.shape.rows if self.few else 4}];")
            else:
                self.body.add(f"i32 {name} = {START[f.attr]};")

    def take(self, folds: list[Value]) -> None:
        """Fold the current lane."""
        for f in folds:
            name, x = self.names[id(f)], self.walk.named(f.args[0])
            if f.attr == "count":
                self.body.add(f"{name} += i < m && {x};")
            elif f.attr != "sum":
                key = x if f.kind == "i32" else f"key({x})"
                self.body.add(f"if (i < m) {name} = op_{f.attr}({name}, {key});")
            elif self.few:
                self.body.add(f"{name}[4 * k + j] = i < m ? {x} : 0.0f;")
            else:
                own = f"i < m ? {x} : 0.0f"
                self.body.add(f"{name}[j] = k ? {name}[j] + ({own}) : {own};")

    def close(self, folds: list[Value]) -> dict[int, str]:
        """Finish the folds after the loop: names of their values. Leaves them for totals."""
        found = {}
        for f in folds:
            found[id(f)] = self.value(f)
            if id(f) in self.walk.totals:
                self.leave(f, found[id(f)])
            if id(f) in self.walk.places:
                self.body.add(f"found_{self.walk.places[id(f)]} = {found[id(f)]};")
            if f.kind == "f32" and f.attr in ("min", "max"):
                found[id(f)] = self.body.declare("float", f"unkey({found[id(f)]})")
        return found

    def value(self, f: Value) -> str:
        b, name, team = self.body, self.names[id(f)], self.shape.team
        if f.attr == "count":
            return str(b.declare("i32", f"team_total<{team}>({name})"))
        if f.attr != "sum":
            return str(b.declare("i32", f"team_{f.attr}<{team}>({name})"))
        half = 2 * self.shape.rows if self.few else 0
        while half >= 4:
            b.add("#pragma unroll")
            b.add(f"for (int e = 0; e < {half}; ++e) {name}[e] += {name}[e + {half}];")
            half //= 2
        four = ", ".join(f"{name}[{j}]" for j in range(4))
        return str(b.declare("float", f"team_sum<{team}>({four})"))

    def leave(self, f: Value, name: str) -> None:
        """Leave the tile's part of a total."""
        bits = f"__float_as_int({name})" if f.attr == "sum" else name
        self.body.add(f"if (m && u == 0) {self.walk.totals[id(f)]}[t] = (u32){bits};")
