"""Tile programs as CUDA kernels: a walk is a kernel over its tiles, after another that counts if it
selects; steps between walks are computed by a block for each piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from compll.backends.cuda import searches, streams
from compll.backends.cuda.body import Body
from compll.backends.cuda.calls import Calls
from compll.backends.cuda.instructions import C_TYPES
from compll.backends.cuda.plan_builder import PlanBuilder
from compll.backends.cuda.selected_lanes import counted
from compll.backends.cuda.walk_kernel import Region, WalkKernel
from compll.ir.expr import Expr
from compll.ir.layout import is_fixed
from compll.ir.tile import GRADIENT, USED, WRONG, Call, Op, Store, Value, Walk, When, count_of

#: threads of a block that computes a piece's numbers
THREADS = 256


class Printer:
    """Adds the kernels of tile programs to a plan. guard: the condition of the current step."""

    def __init__(self, plan: PlanBuilder) -> None:
        self.plan = plan
        self.phase: Body | None = None
        self.guard: tuple[Value, bool] | None = None
        self.lates: dict[int, tuple[Value, bool]] = {}
        self.guards: dict[int, tuple[Value, bool]] = {}
        self.parts: dict[int, tuple[str, Region]] = {}
        self.calls = Calls(self)

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
            if v.level == "piece" and self.late(v) and id(v) not in self.plan.left:
                self.value(v)

    def late(self, v: Value) -> bool:
        """True if a number depends on totals."""
        if id(v) not in self.lates:
            self.lates[id(v)] = v, v.op == "total" or any(map(self.late, v.args))
        return self.lates[id(v)][1]

    def value(self, v: Value) -> str:
        """A number of the piece in the open phase; left for other kernels if it depends on
        totals."""
        if v.op == "const" or not self.late(v):
            return self.open_phase().value(v)
        b = self.open_phase()
        if id(v) in b.named or id(v) in self.plan.left:
            return b.value(v)
        if v.op == "total":
            name = self.total(b, v)
        else:
            for a in v.args:
                self.value(a)
            name = b.declare(C_TYPES[v.kind], b.text(v), "s")
        b.leave(id(v), name)
        return name

    def total(self, b: Body, v: Value) -> str:
        """The total of a walk's fold over all tiles."""
        (f,) = v.args
        parts = self.parts_of(b, f, *self.parts[id(f)])
        text = f"block_{f.attr}({parts})"
        if f.attr in ("max", "min") and v.kind == "f64":
            text = f"({self.parts[id(f)][1].size(b)} ? (double)op_from_key({text}) : 0.0)"
        guard = self.guards.get(id(f))
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

    # steps

    def steps(self, steps: Sequence[Op]) -> None:
        """Steps in order. Numbers read states from memory when a kernel first needs them, so all new
        states of one number are computed before any is stored."""
        states = [s for s in steps if isinstance(s, Store) and s.array.role == "state"]
        for step in steps:
            if step not in states:
                self.step(step)
        for s in states:
            self.value(s.value)
        for s in states:
            name, b = self.value(s.value), self.open_phase()
            to = f"a_{s.array.name} + {b.given('tensor')}"
            b.first(f"keep1({to}, 0, (float){name});")

    def step(self, step: Op) -> None:
        """Add the kernels of a step."""
        STEPS[type(step)](self, step)

    def when(self, step: When) -> None:
        """Steps under a condition; their results are 0 if it does not hold."""
        self.guard = (step.condition, step.wanted)
        for one in step.steps:
            for v in one.results if isinstance(one, Call) else ():
                self.open_phase().first(f"{self.plan.place(id(v))} = 0;")
            for f in one.folds if isinstance(one, Walk) else ():
                self.guards[id(f)] = self.guard
            self.step(one)
        self.guard = None

    def store(self, s: Store) -> None:
        """Store a number of the piece, or a table: in the payload, or in all of the gradient. The
        host knows the length of payloads that do not vary."""
        if s.array is GRADIENT:
            lanes = Value("repeat", (s.value,), "f32", "lane")
            self.walk_kernel("fill", Walk([Store(GRADIENT, lanes)]), {})
            return
        if s.array is USED and is_fixed(self.plan.module):
            return
        value = self.value(s.value)
        b = self.open_phase()
        if s.array is USED:
            b.first(f"used[p] = {value};")
            return
        if s.array is WRONG:
            b.refuse(f"threadIdx.x == 0 && {value} != 0")
            return
        to, storage = b.payload(s.array), s.array.storage
        if s.value.kind == "table":
            each = f"store_float32({to} + 4 * k, {value}[k]);"
            b.add(f"for (int k = threadIdx.x; k < {s.array.domain.of}; k += blockDim.x) {each}")
            return
        cast = "i64" if storage.whole else "float"
        b.first(f"store_{storage.name}({to}, ({cast}){value});")

    def call(self, call: Call) -> None:
        """The kernels of a routine."""
        own = searches.ROUTINES | (streams.LOADS if self.plan.decodes else streams.STORES)
        if call.routine in own:
            own[call.routine](self, call)
        else:
            self.calls.emit(call)

    def walk(self, walk: Walk) -> None:
        """A walk's kernel, after the counts that it needs. It leaves the parts of its totals."""
        self.count(walk)
        region, totals = self.region(walk), {id(f): self.plan.fresh("part") for f in walk.folds}
        self.parts |= {fold: (name, region) for fold, name in totals.items()}
        self.walk_kernel("walk", walk, totals, region)

    def walk_kernel(
        self, what: str, walk: Walk, totals: dict[int, str], region: Region | None = None, *,
        places: dict[int, str] | None = None, repeat: Expr | int | None = None, until: str = "",
    ) -> None:  # fmt: skip
        """The kernel of a walk (see WalkKernel). until: a condition for doing nothing."""
        region = region or self.region(walk)
        self.require([v for v in walk.values if v.level == "piece"])
        self.require([one.limit for one in walk.compacts if one.limit is not None])
        with self.kernel(what, region.grid, self.plan.shape.threads, repeat) as b:
            if until:
                b.skip(until)
            memories = {
                id(f): b.parts(f, totals[id(f)], region.grid) for f in walk.folds if id(f) in totals
            }
            WalkKernel(b, walk, region, memories, places or {}).emit()

    def count(self, walk: Walk) -> None:
        """Count the selected lanes before each tile, and in all."""
        conditions = counted(walk)
        if not conditions:
            return
        folds = {name: count_of(condition) for name, condition in conditions.items()}
        places = {id(f): name for name, f in folds.items()}
        region, count = self.region(walk), Walk(folds=[*folds.values()], domain=walk.domain)
        self.walk_kernel("count", count, {}, region, places=places)
        b = self.open_phase()
        found = {
            name: b.declare("i64", f"scan_array({b.of_blocks(f'blocks_{name}', region.grid)})")
            for name in conditions
        }
        for one in walk.compacts:
            if self.plan.kernel.counts[one.selection].op != "counted":
                continue
            counts = [found[f"always_{one.selection}"]] if one.always is not None else []
            if one.first is not None and one.limit is not None:
                counts.append(f"op_min({found[f'first_{one.selection}']}, {self.value(one.limit)})")
            b.leave(("counted", one.selection), b.declare("i64", " + ".join(counts)))


STEPS: dict[type[Op], Callable[[Printer, Any], None]] = {
    Walk: Printer.walk, When: Printer.when, Store: Printer.store, Call: Printer.call,
}  # fmt: skip
