"""Folds of a tile's lanes: a thread's own first, then those of its team."""

from __future__ import annotations

from typing import Any

from compll.ir.tile import Value
from compll.numerics.numbers import lane_count

#: start value of a fold other than a sum
START = {"max": "-2147483647", "min": "2147483647", "count": "0"}
#: functions that fold two numbers
JOIN = {"max": "op_max", "min": "op_min", "count": "op_add"}


class Folds:
    """Folds of the loops of `walk` (a WalkKernel)."""

    def __init__(self, walk: Any) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        #: true if rows are lanes, too, and are folded first: see [Note: order of sums]
        self.few = self.shape.row < lane_count(self.shape.tile)
        self.names: dict[int, str] = {}
        #: folds whose values the walk itself needs; of others, a block's threads leave one number
        self.needed = {id(a) for v in walk.walk.values for a in v.args}
        self.needed |= {id(s.value) for s in walk.walk.stores} | set(walk.places)
        self.joined = {
            id(f): f for f in walk.walk.folds if f.attr != "sum" and id(f) in walk.totals
        }

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
                self.body.add(f"if (i < m) {name} = op_{f.attr}({name}, {self.key(f.args[0])});")
            elif self.few:
                self.body.add(f"{name}[4 * k + j] = i < m ? {x} : 0.0f;")
            else:
                own = f"i < m ? {x} : 0.0f"
                self.body.add(f"{name}[j] = k ? {name}[j] + ({own}) : {own};")

    def key(self, v: Value) -> str:
        """A lane as an integer that orders as it does."""
        if v.op == "abs" and v.kind == "f32":
            return f"op_magnitude_bits({self.walk.named(v.args[0])})"
        return self.walk.named(v) if v.kind == "i32" else f"op_order_key({self.walk.named(v)})"

    def close(self, folds: list[Value]) -> dict[int, str]:
        """Finish the folds after the loop: names of their values. Leaves them for totals."""
        found = {}
        for f in folds:
            if id(f) in self.joined:
                self.join(f)
                if id(f) not in self.needed:
                    continue
            found[id(f)] = self.value(f)
            if f.attr == "sum" and id(f) in self.walk.totals:
                to, bits = self.walk.totals[id(f)], f"(u32)__float_as_int({found[id(f)]})"
                self.body.add(f"if (m && u == 0) {to}[t] = {bits};")
            if id(f) in self.walk.places:
                self.body.add(f"found_{self.walk.places[id(f)]} = {found[id(f)]};")
            if f.kind == "f32" and f.attr in ("min", "max"):
                found[id(f)] = self.body.declare("float", f"op_from_key({found[id(f)]})")
        return found

    def value(self, f: Value) -> str:
        b, name, team = self.body, self.names[id(f)], self.shape.team
        if f.attr != "sum":
            return str(b.declare("i32", f"team_{f.attr}<{team}>({name})"))
        half = 2 * self.shape.rows if self.few else 0
        while half >= 4:
            b.add("#pragma unroll")
            b.add(f"for (int e = 0; e < {half}; ++e) {name}[e] += {name}[e + {half}];")
            half //= 2
        four = ", ".join(f"{name}[{j}]" for j in range(4))
        return str(b.declare("float", f"team_sum<{team}>({four})"))

    def begin(self) -> None:
        """Declare the threads' parts of totals that may be joined in any order."""
        for f in self.joined.values():
            self.body.add(f"i32 own_{self.walk.totals[id(f)]} = {START[f.attr]};")

    def join(self, f: Value) -> None:
        """Take the thread's part of a total out of the tile."""
        self.body.add(f"own_{self.walk.totals[id(f)]} = {self.names[id(f)]};")

    def leave(self) -> None:
        """Leave the block's parts of totals, after its tiles."""
        b, warps = self.body, self.shape.threads // 32
        if not self.joined:
            return
        b.add(f"__shared__ i32 parts[{len(self.joined)}][{warps}];")
        for k, f in enumerate(self.joined.values()):
            own = f"own_{self.walk.totals[id(f)]}"
            b.add(f"{own} = team_{f.attr}<32>({own});")
            b.add(f"if (threadIdx.x % 32 == 0) parts[{k}][threadIdx.x / 32] = {own};")
        b.add("__syncthreads();")
        b.add("if (threadIdx.x) return;")
        for k, f in enumerate(self.joined.values()):
            own = f"own_{self.walk.totals[id(f)]}"
            one = f"{own} = {JOIN[f.attr]}({own}, parts[{k}][w]);"
            b.add(f"for (int w = 1; w < {warps}; ++w) {one}")
            b.add(f"{self.walk.totals[id(f)]}[blockIdx.x] = (u32){own};")
