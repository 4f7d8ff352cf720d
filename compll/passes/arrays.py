"""Expressions as values and steps: ask for a value, and its steps appear in the order of need.

An expression of single elements is a value of lanes, and stands in the walk that needs it. A total,
a search and a selection are steps. An operator that mixes elements is a call of a routine, which
fills a scratch array. fusion.py orders and joins the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from compll.ir.expr import LIBRARY, Expr, Type, walk
from compll.ir.module import Module
from compll.ir.storage import FLOAT32, INT32
from compll.ir.tile import (
    ELEMENTS,
    GRADIENT,
    Array,
    Compact,
    Domain,
    Extents,
    Kernel,
    Store,
    Value,
    Walk,
    order,
)
from compll.passes.refusal import Unsupported
from compll.passes.searches import Searches
from compll.passes.values import FOLDS, KINDS, SHAPES, Args, Values

#: shapes that have elements
ARRAYS = ("n", "kept", "matrix")
#: instructions whose results only the lane itself has: other places cannot be read
OWN = (
    "draw", "position", "unpack", "selected", "spread", "at", "fold", "count", "bucket", "lookup",
)  # fmt: skip
#: the values of an operator that mixes elements
Operation = Callable[["Arrays", Expr], Value]


@dataclass
class Selecting:
    """A selection, the walk that selects, and arrays of the values that it captures, by the value's
    id.

    late: known for values, by id: true if they are computed only after that walk.
    """

    compact: Compact
    walk: Walk
    parts: dict[int, Array] = field(default_factory=dict)
    late: dict[int, bool] = field(default_factory=dict)


class Arrays(Values):
    """Values of a kernel; adds steps to the kernel as values need them.

    fed: states are available. alone: this rank's fields stand for the combined ones; else the sums
    over ranks are given. own: `field` is the value that this rank stores, not the payload's.
    summed: it is the one that all ranks combined. operations: by name, those whose elements depend
    on other elements of their arguments. conditions: see guards.py.
    """

    def __init__(
        self, module: Module, kernel: Kernel, operations: Mapping[str, Operation], *, fed: bool,
        alone: bool = False, own: bool = False, summed: bool = False,
        conditions: Mapping[int, tuple[Expr, bool]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, kernel)
        self.operations = operations
        self.fed_states, self.alone, self.own, self.summed = fed, alone, own, summed
        self.known: dict[int, Value] = {}
        self.arrays: dict[Hashable, Value] = {}
        self.extremes = {name for name, how in module.rounds if how == "max"}
        self.searches = Searches(self, conditions or {})
        self.selecting: dict[str, Selecting] = {}
        #: a decoded payload that is added to the gradient
        self.incoming: Value | None = None

    # domains

    def extents(self, dims: tuple[Expr, ...]) -> Extents:
        """Rows and columns, at least 1 each."""
        pool = self.module.pool
        whole = Type("int", "static")
        rows, cols = (pool.make("max", (d, pool.const(1)), whole) for d in dims)
        size = pool.make("mul", (rows, cols), whole)
        self.kernel.rooms["", dims] = None
        found = Extents(dims, *map(self.number, (rows, cols, size)))
        return self.kernel.extents.setdefault(dims, found)

    def number(self, e: Expr) -> Value:
        """A static integer as a value of the piece."""
        if e.op in ("max", "mul") and all(a.op == "const" for a in e.args):
            known = [int(a.value) for a in e.args]
            found = max(known) if e.op == "max" else known[0] * known[1]
            return self.make("const", (), "i64", "piece", found)
        return self.static(e)

    def domain(self, type_: Type) -> Domain:
        """The elements of a type."""
        if type_.shape == "matrix":
            return Domain.matrix(self.extents(type_.dims).dims)
        return Domain("kept", type_.of) if type_.shape == "kept" else ELEMENTS

    def walk(self, type_: Type, *stores: Store) -> Walk:
        """A walk over the elements of a type."""
        return Walk(list(stores), domain=self.domain(type_))

    def array(self, type_: Type) -> Array:
        """A new scratch array for the elements of a type."""
        storage = FLOAT32 if type_.dtype == "float" else INT32
        return self.scratch(f"a{len(self.kernel.scratch)}", storage, self.domain(type_))

    def load(self, array: Array) -> Value:
        """A lane's element of an array."""
        kind = "i32" if array.storage == INT32 else "f32"
        return self.make("load", (), kind, "lane", array)

    def stored_array(self, value: Value, type_: Type) -> Value:
        """The value, loaded from a scratch array that a walk stores it in."""
        key = (
            id(value),
            type_.shape,
            type_.of,
            type_.dims,
        )  # equal values over other elements differ
        if key not in self.arrays:
            whole = self.whole(value) if value.kind == "bool" else value
            f = self.array(replace(type_, dtype="float" if whole.kind == "f32" else "int"))
            self.kernel.steps.append(self.walk(type_, Store(f, whole)))
            found = self.load(f)
            self.arrays[key] = self.truth(found) if value.kind == "bool" else found
        return self.arrays[key]

    # values

    def of(self, expr: Expr) -> Value:
        if id(expr) not in self.known:
            for e in walk(expr, into=self.enters):
                if id(e) not in self.known and e.type.shape in SHAPES:
                    value = self.known[id(e)] = self.found(e)
                    self.kernel.exprs.setdefault(id(value), (value, e))
        return self.known[id(expr)]

    def enters(self, e: Expr) -> bool:
        """True if the arguments of an expression are values that it needs first."""
        fresh = id(e) not in self.known and e.op not in self.operations
        return fresh and e.type.shape != "static"

    def found(self, e: Expr) -> Value:
        if e.type.shape == "static":
            return self.static(e)
        if e.op in FOLDS and e.type.shape == "scalar":
            return self.total(e)
        if e.type.shape in ARRAYS and e.op in self.operations:
            return self.operations[e.op](self, e)
        if e.op in LIBRARY:
            return self.searched(e)
        args = [self.argument(a, e) for a in e.args]
        wide = any(a.type.shape == "scalar" and a.type.dtype == "float" for a in e.args)
        return (
            self.beside_numbers(e, args) if e.type.shape == "matrix" and wide else self.one(e, args)
        )

    def elementwise(self, e: Expr) -> bool:
        """True if each element depends on the same element of the arguments alone."""
        return e.type.shape in ARRAYS and e.op not in self.operations and bool(e.args)

    def argument(self, a: Expr, e: Expr) -> Value:
        """An argument's value. A single row or column repeats."""
        if a.type.shape == "matrix" and e.type.shape == "matrix" and a.type.dims != e.type.dims:
            row, column = self.place(e.type.dims)
            own = [d.op == "const" and d.value == 1 for d in a.type.dims]
            zero = self.make("const", (), "i32", "piece", 0)
            at = zero if all(own) else column if own[0] else row
            return self.element(a, self.lanes(at))
        return self.of(a)

    def beside_numbers(self, e: Expr, args: Args) -> Value:
        """The value of a matrix and a number: both, and the result, are float64, as in the
        reference."""
        args = [self.make("convert", [v], "f64", v.level) if v.kind == "f32" else v for v in args]
        op = "where" if e.op == "choose" else e.op
        if e.type.dtype == "bool":
            return self.make(op, args, "bool", "lane")
        found = self.make(op, args, "f64", "lane")
        return self.make("convert", [found], KINDS[e.type.dtype], "lane")

    def total(self, e: Expr) -> Value:
        """The sum, maximum or minimum of an array."""
        (x,) = e.args
        if x.type.shape not in ARRAYS:
            raise Unsupported("reductions over groups or samples", "", e)
        fold = self.fold(e)
        one = self.walk(x.type)
        one.folds.append(fold)
        self.kernel.steps.append(self.searches.guarded(e, one))
        return self.make("total", [fold], "f64", "piece", fold.attr)

    def searched(self, e: Expr) -> Value:
        """A threshold or a table, with the step that finds it."""
        step, value = self.searches.step(e)
        self.kernel.steps.append(self.searches.guarded(e, step))
        return value

    # elements at other places

    def place(self, dims: tuple[Expr, ...]) -> tuple[Value, Value]:
        """The row and the column of a matrix's lane.

        The float64 quotient of integers below 2**53, rounded down, is exact.
        """
        at, cols = self.position(), self.extents(dims).cols
        wide, width = (self.do("convert", v, kind="f64") for v in (at, cols))
        quotient = self.do("floor", self.do("div", wide, width, kind="f64"), kind="f64")
        row = self.do("convert", quotient)
        return row, self.do("sub", at, self.do("mul", row, self.narrow(cols, "lane")))

    def do(self, op: str, *args: Value, kind: str = "i32") -> Value:
        """An instruction: of lanes if an argument is, else of the piece."""
        level = "lane" if any(a.level == "lane" for a in args) else "piece"
        return self.make(op, args, kind, level)

    def constant(self, number: float) -> Value:
        """A constant: int32 of an int, float32 of a float."""
        kind = "i32" if isinstance(number, int) else "f32"
        return self.make("const", (), kind, "piece", number)

    def position(self) -> Value:
        """The number of the lane."""
        return self.make("position", (), "i32", "lane")

    def cols(self, e: Expr) -> Value:
        """The number of columns of a matrix, as an int32."""
        return self.narrow(self.extents(e.type.dims).cols, "lane")

    def moved(self, value: Value, place: Value, type_: Type) -> Value:
        """The value that the lane at `place` has."""
        lanes = [v for v in order([value]) if v.level == "lane"]
        if any(v.op in OWN or (v.op == "load" and v.attr.received) for v in lanes):
            value = self.stored_array(value, type_)
        return self.at(value, place)

    def at(self, value: Value, place: Value) -> Value:
        if value.level != "lane":
            return value
        if value.op == "load":
            return self.make("at", [place], value.kind, "lane", value.attr)
        args = [self.at(a, place) for a in value.args]
        return self.make(value.op, args, value.kind, value.level, value.attr)

    def element(self, e: Expr, place: Value) -> Value:
        """The element of a matrix at `place`; zero beyond the elements that the matrix was made
        of."""
        if e.op != "matrix":
            return self.moved(self.of(e), place, e.type)
        size = self.narrow(self.make("size", (), "i64", "piece"), "lane")
        inside = self.do("lt", place, size, kind="bool")
        near = self.do("where", inside, place, self.constant(0))
        value = self.moved(self.lanes(self.of(e.args[0])), near, e.args[0].type)
        return self.do("where", inside, value, self.constant(0.0), kind="f32")

    def op_lookup(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        if e.args[0].type.shape != "matrix":
            return super().op_lookup(e, args, kind, level)
        index, row = self.argument(e.args[1], e), e.args[0]
        if row.op == "field" and not (self.own or self.summed) and row.type.dims[1].op == "const":
            f = self.fields[str(row.value)]
            if f.storage == "float32":  # its bytes are a table
                table = self.make("load", (), "table", "piece", Array.of(f, "incoming"))
                size = int(row.type.dims[1].value)
                return self.make("lookup", [table, index], "f32", level, size)
        last = self.do("sub", self.cols(e.args[0]), self.constant(1))
        low = self.do("max", index, self.constant(0))
        found = self.element(e.args[0], self.do("min", low, last))
        return found if kind == "f32" else self.make("convert", [found], kind, level)

    # selections

    def op_count_kept(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        if self.own:  # a decoder is given the number
            self.operations[e.op](self, e)  # have them selected
        return self.kernel.counts[str(e.value or e.type.of)]

    # input, states, fields, and sums over ranks

    def op_input(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        """The gradient; with feedback plus the residual, or minus the reference."""
        g = self.load(GRADIENT)
        if self.incoming is not None:
            g = self.make("add", [g, self.incoming], "f32", "lane")
        g = self.make("mul", [g, self.make("scale", (), "f32", "piece")], "f32", "lane")
        if not (self.fed_states and self.module.feedback):
            return g
        held = self.load(self.states[self.module.fed_state])
        if self.module.differences:
            return self.make("sub", [g, held], "f32", "lane")
        if self.module.decay != 1:
            held = self.make("mul", [held, self.constant(self.module.decay)], "f32", "lane")
        return self.make("add", [g, held], "f32", "lane")

    def op_state(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        kind = "f32" if level == "lane" else "f64"
        if not self.fed_states:
            zero = self.make("const", (), kind, "piece", 0.0)
            return self.lanes(zero) if level == "lane" else zero
        f = self.states[str(e.value)]
        if e.type.shape != "matrix":
            return self.make("load", (), kind, level, f)
        fits = self.fits(e.type)
        place = self.do("where", fits, self.position(), self.constant(0))
        held = self.make("at", [place], "f32", "lane", f)
        return self.do("where", fits, held, self.constant(0.0), kind="f32")

    def fits(self, type_: Type) -> Value:
        """Condition that a piece has room for a state that is a matrix."""
        pool, whole = self.module.pool, Type("int", "static")
        rows, cols = (pool.make("max", (d, pool.const(1)), whole) for d in type_.dims)
        n = pool.make("param", (), whole, "n")
        size = pool.make("mul", (rows, cols), whole)
        return self.static(pool.make("le", (size, n), Type("bool", "static")))

    def op_field(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        return self.operations[e.op](self, e)

    op_combined = op_field
