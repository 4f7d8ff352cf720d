"""Kernels of a plan, and numbers of pieces, which a block for each piece computes between them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from compll.backends.cuda import instructions
from compll.backends.cuda.body import Body
from compll.backends.cuda.elements import ElementArrays, Folds, Region, SelectedElements, Stores
from compll.backends.cuda.instructions import C_TYPES, CodeTables
from compll.backends.cuda.plans import PlanBuilder
from compll.backends.loops import Loop, loops, order_of_elements
from compll.ir.expr import Expr
from compll.ir.storage import FLOAT32, INT32
from compll.ir.tile import Array, Domain, Store, Value, Walk, order_inside
from compll.passes.values import Bounds

# ---- walks --------------------------------------------------------------------------------------
# A walk over the tiles of a piece as a kernel: a team of threads per tile, loops over its
# elements.


class WalkKernel:
    """Prints one walk into `body`. totals: memories of folds; places: names of
    counts, for each of which the walk leaves the number before a tile in its block, and the block's
    number."""

    def __init__(
        self,
        body: Body,
        walk: Walk,
        region: Region,
        totals: dict[Value, str],
        places: dict[Value, str],
    ) -> None:
        self.body, self.walk, self.region = body, walk, region
        self.totals, self.places = totals, places
        self.shape, self.tile = body.plan.shape, body.plan.shape.tile
        # computed elements take long to compile: then one row at a time
        elements = any(v.op == "at" or self.computed(v) for v in walk.values)
        self.held = 1 if elements else self.shape.held
        self.turns = self.shape.rows // self.held
        #: see [Note: rows of small tiles]
        self.exchanges = self.shape.team < 4 and self.turns == 1
        self.body.resident = 1024 // self.shape.threads if self.exchanges else 0
        self.rows = f"READY, {self.shape.team}, {self.shape.rows}"
        self.loops = loops(walk, self.tile, ordered=False)
        self.draws = sorted({v.attr for v in walk.values if v.op == "draw"})
        self.local: dict[Value, str] = {}
        self.bounds = Bounds()
        self.tables = CodeTables(walk.values, walk.roots)
        self.arrays = ElementArrays(self)
        self.folds = Folds(self)
        self.stores = Stores(self)
        self.selected = SelectedElements(self)

    def computed(self, v: Value) -> bool:
        """True if a function computes the element that is read."""
        return isinstance(v.attr, Array) and v.attr in self.body.plan.elements

    def emit(self) -> None:
        """Add the kernel's text."""
        b, s = self.body, self.shape
        b.hoist("size", f"const i64 size = {self.region.size(b)};")
        b.add(f"const int u = threadIdx.x % {s.team}, team = threadIdx.x / {s.team};")
        b.add(f"const i64 t = own * {s.teams} + team, o = t * {self.tile};")
        if self.walk.domain.of:
            b.add(f"if (own * {s.teams * self.tile} >= size) return;")
        self.keys()
        self.stores.share()
        self.folds.begin()
        for name in self.places.values():
            b.add(f"i32 found_{name} = 0;")
        with b.block("const auto tile = [&](auto ready)", "};"):
            b.add("constexpr bool READY = decltype(ready)::value;")
            whole = f"READY || size - o >= {self.tile}"
            b.add(f"const int m = {whole} ? {self.tile} : size > o ? (int)(size - o) : 0;")
            self.of_team()
        aligned = " && ".join(
            [*self.arrays.aligned(), f"__all_sync(FULL, size - o >= {self.tile})"]
        )
        b.add(f"if ({aligned}) tile(Ready<true>()); else tile(Ready<false>());")
        for name in self.places.values():
            self.place(name)
        self.folds.leave()

    def place(self, name: str) -> None:
        """Leave the number before each tile in the block, and the block's number."""
        b, grid = self.body, self.region.grid
        before = b.memory(f"before_{name}", "uint32", grid)
        blocks = b.plan.of_blocks(f"blocks_{name}", "uint32", grid)
        before_this = f"block_scan<{self.shape.threads}>(u == 0 ? found_{name} : 0, &all_{name})"
        b.add(f"i64 all_{name};")
        b.add(f"const i64 own_{name} = {before_this};")
        b.add(f"if (u == 0 && o < size) {before}[t] = (u32)own_{name};")
        b.add(f"if (threadIdx.x == 0) {blocks}[blockIdx.x] = (u32)all_{name};")

    def keys(self) -> None:
        """Put the keys of a block's random draws in shared memory."""
        if not self.draws:
            return
        b = self.body
        tensor, step = map(b.given, ("tensor", "step"))
        offset = "0" if self.walk.domain.dims else b.given("offset")
        b.add(f"__shared__ i64 keys[{2 * len(self.draws)}];")
        b.add(f"const i64 block_begin = {offset} + own * {self.shape.teams * self.tile};")
        for k, draw in enumerate(self.draws):
            seed = "seed" if draw >= 0 else "0"  # the same on all ranks
            given = f"{seed}, {step}, {tensor}, {draw}, block_begin"
            b.add(f"block_keys(keys + {2 * k}, {given});")
        b.add("__syncthreads();")

    def of_team(self) -> None:
        b = self.body
        if self.draws:
            b.add(f"const i64 begin = {'0' if self.walk.domain.dims else 'offset'} + o;")
            b.add("const int high = (int)((begin >> 32) - (block_begin >> 32));")
            for k, draw in enumerate(self.draws):
                b.add(f"const u64 {draw_name(draw)} = keys[{2 * k} + high];")
        self.stores.open()
        self.selected.open()
        if self.turns == 1:
            b.add("const int c = 0;")
            self.arrays.load()
        self.stores.of_tiles()
        for loop in self.loops:
            self.one_loop(loop)
            self.stores.of_tiles()

    def one_loop(self, loop: Loop) -> None:
        """A loop over the rows of a tile, and values known after it."""
        values = self.order(loop)
        for v in values:
            for a in self.tables.args(v):
                if a.level == "tile":
                    self.of_tile(a)
        b = self.body
        self.folds.open(loop.folds)
        self.stores.open_codes(loop.stores)
        self.stores.open_sums(loop.stores)
        self.selected.begin()
        with self.chunks():
            b.add("#pragma unroll")
            with b.block(f"for (int row = 0; row < {self.held}; ++row)"):
                b.add(f"const int k = c * {self.held} + row, l = k * {self.shape.row} + 4 * u;")
                self.arrays.load_row(values)
                self.stores.open_row(loop.stores)
                self.selected.row(loop)
                with self.each_of_row(values):
                    self.folds.take(loop.folds)
                    self.stores.take(loop.stores)
                self.stores.row(loop.stores)
        self.stores.rows(loop.stores)
        self.stores.codes(loop.stores)
        self.local.update(self.folds.close(loop.folds))

    def order(self, loop: Loop) -> list[Value]:
        """Values per element that a loop computes, arguments first."""
        return order_of_elements(loop, (), self.tables.args)

    @contextmanager
    def chunks(self) -> Iterator[None]:
        """A context for a loop over rows: a tile too large for registers is read chunk by chunk."""
        with self.body.block(""):
            if self.turns == 1:
                yield
                return
            if self.held < self.shape.held:
                self.body.add("#pragma unroll 1")
            with self.body.block(f"for (int c = 0; c < {self.turns}; ++c)"):
                self.arrays.load()
                yield

    @contextmanager
    def each_of_row(self, values: list[Value]) -> Iterator[None]:
        """A loop over a thread's four elements of a row, with these values."""
        b = self.body
        outer = dict(self.local)
        b.add("#pragma unroll")
        with b.block("for (int j = 0; j < 4; ++j)"):
            b.add("const int i = l + j;")
            for v in values:
                self.local[v] = b.declare(C_TYPES[v.kind], self.element(v))
            yield
        self.local = outer

    def element(self, v: Value) -> str:
        """A value of the current element, made of named ones."""
        if v.op in ("load", "unpack"):
            return self.arrays.element(v)
        if v.op == "draw":
            return f"uniform(begin + i, {draw_name(v.attr)})"
        if v.op == "position":
            return "(i32)(o + i)"
        if v.op in ("selected", "spread"):
            return self.selected.element(v)
        if v.op == "at":
            return self.arrays.at(v, f"(i < m ? (i64)(u32){self.named(v.args[0])} : 0)")
        if v in self.tables.asked:
            return self.asked(v, *self.tables.asked[v])
        return self.text(v)

    def asked(self, v: Value, code: Value, numbers: Any) -> str:
        """The number of an element's code, from the thread of the warp that holds it."""
        held = ", ".join(map(str, numbers.view(np.int32)))
        name = f"held{zlib.crc32(held.encode()):08x}"
        table = f"static constexpr i32 of_{name}[] = {{{held}}};\n"
        table += f"  const i32 {name} = of_{name}[threadIdx.x % {len(numbers)}];"
        text = f"__shfl_sync(FULL, {self.body.hoist(name, table)}, {self.named(code)}, 32)"
        return f"__int_as_float({text})" if v.kind == "f32" else text

    def text(self, v: Value) -> str:
        """An instruction applied to its arguments."""
        return instructions.text(v, [self.named(a) for a in v.args], self.bounds)

    def named(self, v: Value) -> str:
        """The name of a value of any level."""
        if v.kind == "table" and v.op == "load" and v.attr.received:
            return f"Table<READY>{{{self.arrays.pointer(v.attr)}}}"
        if v.level == "piece":
            return self.body.value(v)
        return self.local[v] if v in self.local else self.of_tile(v)

    def of_tile(self, v: Value) -> str:
        """A value of the tile, declared outside of loops over elements."""
        for value in order_inside([v]):
            if value.level == "tile" and value not in self.local:
                self.local[value] = self.body.declare(C_TYPES[value.kind], self.tile_text(value))
        return self.local[v]

    def tile_text(self, v: Value) -> str:
        if v.op == "count":
            return "(float)m"
        if v.op == "load":
            return self.arrays.of_tile(v)
        assert v.op != "fold"
        return self.text(v)


def draw_name(draw: int) -> str:
    """The name of a draw's keys."""
    return f"r{draw}" if draw >= 0 else f"shared{-draw}"


# ---- printer ------------------------------------------------------------------------------------

#: threads of a block that computes a piece's numbers
THREADS = 256


class Printer:
    """Adds kernels to a plan, and numbers of pieces that they need.

    guard: the condition of the current step.
    """

    def __init__(self, plan: PlanBuilder) -> None:
        self.plan = plan
        self.phase: Body | None = None
        self.guard: tuple[Value, bool] | None = None
        self.dependent: dict[Value, bool] = {}
        self.guards: dict[Value, tuple[Value, bool]] = {}
        self.parts: dict[Value, tuple[str, Region]] = {}
        self.arrays: dict[tuple[Value, Domain], Array] = {}

    # kernels

    def open_phase(self) -> Body:
        """The kernel that computes numbers of pieces, after the launches so far."""
        if self.phase is None:
            self.phase = self.body(-1, THREADS)
        return self.phase

    def end_phase(self) -> None:
        """Have the next kernel launch after the open phase."""
        if self.phase is not None:
            self.plan.launch("piece", -1, THREADS, self.phase)
            self.phase = None

    def body(self, grid: int, threads: int) -> Body:
        """A kernel's text, which begins by leaving out pieces without elements and bad ones."""
        b = Body(self.plan, grid, threads)
        if grid < 0:
            b.skip(f"{b.given('n')} == 0")
        if self.plan.checks:
            b.skip_bad()
        return b

    @contextmanager
    def kernel(
        self, what: str, grid: int, threads: int, repeat: Expr | int | None = None
    ) -> Iterator[Body]:
        """A kernel of its own, launched after earlier ones."""
        self.require([self.guard[0]] if self.guard else [])
        self.end_phase()
        b = self.body(grid, threads)
        if self.guard is not None:
            condition, wanted = self.guard
            b.skip(f"{'!' if wanted else ''}{b.value(condition)}")
        yield b
        self.plan.launch(what, grid, threads, b, repeat, b.resident)

    # numbers of a piece

    def require(self, values: Sequence[Value]) -> None:
        """Make numbers that depend on totals known to the next kernel."""
        for v in values:
            if v.level == "piece" and self.data_dependent(v) and v not in self.plan.left:
                self.value(v)

    def data_dependent(self, v: Value) -> bool:
        """True if a number depends on totals."""
        if v not in self.dependent:
            self.dependent[v] = v.op == "total" or any(map(self.data_dependent, v.args))
        return self.dependent[v]

    def value(self, v: Value) -> str:
        """A number of the piece in the open phase; left for other kernels if it depends on
        totals."""
        if v.op == "const" or not self.data_dependent(v):
            return self.open_phase().value(v)
        b = self.open_phase()
        if v in b.named or v in self.plan.left:
            return b.value(v)
        if v.op == "total":
            name = self.total(b, v)
        else:
            for a in v.args:
                self.value(a)
            name = b.declare(C_TYPES[v.kind], b.text(v), "s")
        b.leave(v, name)
        return name

    def total(self, b: Body, v: Value) -> str:
        """The total of a walk's fold over all tiles."""
        (f,) = v.args
        parts = self.parts_of(b, f, *self.parts[f])
        text = f"block_{f.attr}({parts})"
        if f.attr in ("max", "min") and v.kind == "f64":
            text = f"({self.parts[f][1].size(b)} ? (double)op_from_key({text}) : 0.0)"
        guard = self.guards.get(f)
        if guard is not None:
            text = f"{'' if guard[1] else '!'}{self.value(guard[0])} ? {text} : 0"
        return b.declare(C_TYPES[v.kind], text, "s")

    def parts_of(self, b: Body, f: Value, memory: str, region: Region) -> str:
        """Pointer to a fold's parts of a total, and their number."""
        shape, parts = self.plan.shape, b.parts(f, memory, region.grid)
        each = shape.tile * (1 if f.attr == "sum" else shape.teams)
        if f.attr != "sum":
            parts = f"{parts} + {b.first_block(region.grid)}"
        return f"{parts}, ({region.size(b)} + {each - 1}) / {each}"

    def region(self, walk: Walk) -> Region:
        """The tiles that a walk runs over."""
        return Region(self.plan.tiles(walk.domain), lambda b: b.items(walk.domain))

    def walk_kernel(
        self, what: str, walk: Walk, totals: dict[Value, str], region: Region | None = None, *,
        places: dict[Value, str] | None = None, repeat: Expr | int | None = None, until: str = "",
    ) -> None:  # fmt: skip
        """The kernel of a walk (see WalkKernel). until: a condition for doing nothing."""
        region = region or self.region(walk)
        self.require([v for v in walk.values if v.level == "piece"])
        self.require([compact.limit for compact in walk.compacts if compact.limit is not None])
        with self.kernel(what, region.grid, self.plan.shape.threads, repeat) as b:
            if until:
                b.skip(until)
            memories = {f: b.parts(f, totals[f], region.grid) for f in walk.folds if f in totals}
            WalkKernel(b, walk, region, memories, places or {}).emit()

    def array(self, value: Value, domain: Domain) -> Array:
        """The scratch array of a value per element; stores the value in one if necessary."""
        if value.op == "load" and value.attr.role == "scratch":
            array: Array = value.attr
            if array not in self.plan.elements:
                return array
        key = (value, domain)
        if key not in self.arrays:
            storage = INT32 if value.kind == "i32" else FLOAT32
            array = Array(self.plan.fresh("view "), "scratch", storage, domain)
            self.walk_kernel("step", Walk([Store(array, value)], domain=domain), {})
            self.arrays[key] = array
        return self.arrays[key]
