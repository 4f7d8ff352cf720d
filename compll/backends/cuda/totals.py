"""Numbers of a whole piece: sums and extremes of arrays, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from compll.backends.cuda.domains import PIECE, Domain, domain_of
from compll.backends.cuda.elements import ALONE, kept_in_memory
from compll.backends.cuda.reads import Reads
from compll.backends.cuda.text import TENSOR, tensor
from compll.ir.expr import Expr, walk
from compll.ir.layout import TILE
from compll.ir.program import REDUCTIONS, Unsupported

LANES = 128  # threads that add the parts of a piece


class Totals(Reads):
    """Elements that come after the arrays and numbers that they need: see need()."""

    def __init__(self, *args: object, **more: object) -> None:
        self.slots: dict[int, int] = {}
        self.slot_count = 0
        self.wanted: list[Expr] = []
        self.parts: dict[int, tuple[int, str]] = {}
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.memory("sc", "float64", PIECE, factor=1)

    # what must be there before a kernel

    def need(self, *roots: Expr) -> None:
        """Make all arrays and numbers below these expressions, and at them."""
        for e in walk(*roots, into=lambda e: e.type.shape != "static"):
            if e.type.shape == "static":
                continue
            self.prepare(e)
            if e.type.shape == "scalar":
                continue
            for a in e.args:
                if a.type.shape == "scalar":
                    self.want(a)
        for e in roots:
            if e.type.shape == "scalar":
                self.want(e)
        self.flush()

    def prepare(self, e: Expr) -> None:
        """Make what one expression takes to be read."""
        if e.op in ("gather", "indices", "in", "count_kept"):
            self.select(str(e.value if e.value is not None else e.type.of))
        if e.op in REDUCTIONS:
            self.reduce(e)
        elif e.op == "combined":
            self.combine(str(e.value))
        elif kept_in_memory(e) and not self.known(e):
            self.flush()
            self.make(e)

    def make(self, e: Expr) -> None:
        """Compute an array; what it needs is there."""
        raise NotImplementedError

    def select(self, name: str) -> None:
        """Draw a selection."""
        raise NotImplementedError

    def combine(self, name: str) -> None:
        """Have what is read in the place of `combined(name)`."""
        raise NotImplementedError

    # numbers

    def want(self, e: Expr) -> None:
        if id(e) not in self.slots and all(e is not w for w in self.wanted):
            self.wanted.append(e)

    def new_slot(self, e: Expr) -> None:
        if id(e) not in self.slots:
            self.slots[id(e)] = self.slot_count
            self.slot_count += 1

    def slot(self, e: Expr) -> int:
        return self.slots[id(e)]

    def reduce(self, e: Expr) -> None:
        """Leave a part of a reduction for every tile: see [Note: order of sums]."""
        (x,) = e.args
        if id(e) in self.parts or id(e) in self.slots:
            return
        if x.type.shape not in ("n", "kept", "matrix"):
            raise Unsupported(f"reductions over groups or samples in {ALONE}", "", e)
        self.flush()
        domain, warps = domain_of(x.type), self.threads // 32
        parts = self.memory(self.name("parts"), "uint32", domain, each=warps * TILE, factor=warps)
        with self.kernel("parts", domain, warps * TILE):
            self.parts[id(e)] = (self.steps[-1].grid, parts.name)
            count = self.count(domain)
            self.head.add(f"const i64 t = own * {warps} + threadIdx.x / 32, o = t * {TILE};")
            self.head.add("const int u = threadIdx.x % 32;")
            if e.op == "reduce_sum":
                self.tile_sum(x, domain, count)
            else:
                self.tile_extreme(x, domain, count, e.op)
            self.body.add(
                f"if (u == 0) {parts.name}[firsts[p] * {warps} + t] = (u32)__float_as_int(part);"
                if e.op == "reduce_sum"
                else f"if (u == 0) {parts.name}[firsts[p] * {warps} + t] = (u32)part;"
            )

    def tile_sum(self, x: Expr, domain: Domain, count: str) -> None:
        self.body.add("float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};")
        with (
            self.inner(f"for (int k = 0; k < {TILE // 128}; ++k)"),
            self.inner("for (int j = 0; j < 4; ++j)"),
        ):
            value = self.of_tile(x, domain, count)
            self.body.add(f"const float one = inside ? {value} : 0.0f;")
            self.body.add("lanes[j] = k ? lanes[j] + one : one;")
        self.body.add("const float part = lane_sum(lanes[0], lanes[1], lanes[2], lanes[3]);")

    def of_tile(self, x: Expr, domain: Domain, count: str) -> str:
        """Element j of row k of the tile; where there is none, another, and not `inside`."""
        self.body.add("const i64 e = o + k * 128 + 32 * j + u;")
        self.body.add(f"const bool inside = e < {count};")
        self.body.add("const i64 i = inside ? e : 0;")
        return self.value(x, self.place(domain, "i"))

    def tile_extreme(self, x: Expr, domain: Domain, count: str, op: str) -> None:
        largest = op == "reduce_max"
        self.body.add(f"i32 best = {-2147483647 if largest else 2147483647};")
        with (
            self.inner(f"for (int k = 0; k < {TILE // 128}; ++k)"),
            self.inner("for (int j = 0; j < 4; ++j)"),
        ):
            value = self.of_tile(x, domain, count)
            how = "i_max" if largest else "i_min"
            self.body.add(f"if (inside) best = {how}(best, key({value}));")
        self.body.add(f"const i32 part = team_{'max' if largest else 'min'}<32>(best);")

    def flush(self) -> None:
        """Compute the wanted numbers, in a block per piece."""
        if not self.wanted:
            return
        wanted, self.wanted = self.wanted, []
        inner = list(walk(*wanted, into=self.unknown))
        totals = [e for e in inner if id(e) in self.parts and id(e) not in self.slots]
        for e in (*totals, *wanted):
            self.new_slot(e)
        with self.kernel("numbers", PIECE, 1, LANES):
            for e in totals:
                self.total(e)
            self.body.add("if (threadIdx.x) return;")
            self.numbers(inner, {id(e) for e in totals}, wanted)

    def unknown(self, e: Expr) -> bool:
        """Whether a number is yet to be computed from others."""
        return e.type.shape == "scalar" and e.op not in REDUCTIONS and id(e) not in self.slots

    def total(self, e: Expr) -> None:
        """Reduce the parts, by all threads."""
        grid, parts = self.parts[id(e)]
        warps, count = self.threads // 32, self.count(domain_of(e.args[0].type))
        tiles = f"({count} + {TILE - 1}) / {TILE}"
        begin = f"{parts} + first[{grid} * (pieces + 1) + p] * {warps}"
        if e.op == "reduce_sum":
            text = f"block_total({begin}, {tiles})"
        else:
            largest = "true" if e.op == "reduce_max" else "false"
            text = f"{count} ? (double)unkey(block_extreme({begin}, {tiles}, {largest})) : 0.0"
        self.body.add(f"const double s{self.slots[id(e)]} = {text};")

    def numbers(self, inner: Iterable[Expr], known: set[int], wanted: list[Expr]) -> None:
        """Name all numbers, in order, and keep those that are wanted."""
        names = {i: f"s{self.slots[i]}" for i in known}
        for e in inner:
            if id(e) in names:
                continue
            if e.type.shape == "static" or (id(e) in self.slots and not self.is_wanted(e, wanted)):
                names[id(e)] = self.number(e)
            elif e.type.shape == "scalar":
                names[id(e)] = self.declare("double", self.number_text(e, names))
        for e in (e for i in known for e in inner if id(e) == i):
            self.body.add(f"sc[p * @SLOTS@ + {self.slots[id(e)]}] = {names[id(e)]};")
        for e in wanted:
            if id(e) not in known:
                self.body.add(f"sc[p * @SLOTS@ + {self.slots[id(e)]}] = {names[id(e)]};")

    @staticmethod
    def is_wanted(e: Expr, wanted: list[Expr]) -> bool:
        return any(e is w for w in wanted)

    def number_text(self, e: Expr, names: dict[int, str]) -> str:
        """A number that follows from others, or is read."""
        if e.op == "state":
            return f"a_{e.value}[table[5 * p + 2]]" if self.fed else "0.0"
        if e.op in ("field", "combined"):
            where = (self.fields if e.op == "field" else self.sums)[str(e.value)]
            return self.read(e, where, "0")
        if e.op == "count_kept":
            return self.count(Domain("kept", str(e.value if e.value is not None else e.type.of)))
        if e.op not in TENSOR:
            raise Unsupported(f"`{e.op}` in {ALONE}", "", e)
        return tensor(e, [names.get(id(a), "") for a in e.args])

    def finished(self) -> str:
        slots = max(1, self.slot_count)
        self.scratch["sc"] = replace(self.scratch["sc"], factor=slots)
        return super().finished().replace("@SLOTS@", str(slots))
