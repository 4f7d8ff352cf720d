"""Kernels of a plan, and numbers of pieces, which a block for each piece computes between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from compll.backends.cuda.body import Body
from compll.backends.cuda.instructions import C_TYPES
from compll.backends.cuda.lanes import Region
from compll.backends.cuda.plans import PlanBuilder
from compll.backends.cuda.walk_kernel import WalkKernel
from compll.ir.expr import Expr
from compll.ir.storage import FLOAT32, INT32
from compll.ir.tile import Array, Domain, Store, Value, Walk

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
        """The scratch array of a value of lanes; stores the value in one if necessary."""
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
