"""Expressions that mix elements as steps: matrices, transforms, drawn selections, rounds.

An expression of single elements is a value of lanes, and stands in the walk that needs it. An
operator that mixes elements is a call (see ROUTINES in ir/tile.py), which fills a scratch array.
Both are made on first use, so steps stand in the order in which values need each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from compll.ir.expr import Expr, Type, walk
from compll.ir.module import Field, Module
from compll.ir.program import LIBRARY, TABLES, Unsupported
from compll.ir.tile import SCRATCH, Extents, Kernel, Store, Value, Walk, order
from compll.passes import tables
from compll.passes.thresholds import Thresholds
from compll.passes.values import FOLDS, KINDS, Values

#: shapes that have elements
ARRAYS = ("n", "kept", "matrix")
#: instructions whose results only the lane itself has: other places cannot be read
OWN = (
    "draw", "position", "unpack", "selected", "spread", "at", "fold", "count", "bucket", "lookup",
)  # fmt: skip
#: the values of an operator that mixes elements
Operation = Callable[["Arrays", Expr], Value]


class Arrays(Values):
    """Values of a kernel; adds steps to the kernel as values need them.

    fed: states are available. alone: this rank's fields stand for the combined ones; else the sums
    over ranks are given. own: `field` is the value that this rank stores, not the payload's.
    summed: it is the one that all ranks combined. operations: by name, those whose elements depend
    on other elements of their arguments.
    """

    def __init__(
        self, module: Module, kernel: Kernel, operations: Mapping[str, Operation], *, fed: bool,
        alone: bool = False, own: bool = False, summed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(module, kernel)
        self.operations = operations
        self.fed_states, self.alone, self.own, self.summed = fed, alone, own, summed
        self.known: dict[int, Value] = {}
        self.arrays: dict[Hashable, Value] = {}
        self.extremes = {name for name, how in module.rounds if how == "max"}
        self.thresholds = Thresholds(self, {})

    # domains

    def extents(self, dims: tuple[Expr, ...]) -> Extents:
        """Rows and columns, at least 1 each."""
        pool = self.module.pool
        whole = Type("int", "static")
        rows, cols = (pool.make("max", (d, pool.const(1)), whole) for d in dims)
        size = pool.make("mul", (rows, cols), whole)
        self.kernel.rooms["", dims] = None
        return Extents(dims, *map(self.number, (rows, cols, size)))

    def number(self, e: Expr) -> Value:
        """A static integer as a value of the piece."""
        if e.op in ("max", "mul") and all(a.op == "const" for a in e.args):
            known = [int(a.value) for a in e.args]
            found = max(known) if e.op == "max" else known[0] * known[1]
            return self.make("const", (), "i64", "piece", found)
        return self.static(e)

    def walk(self, type_: Type, *stores: Store) -> Walk:
        """A walk over the elements of a type."""
        matrix = self.extents(type_.dims) if type_.shape == "matrix" else None
        return Walk(list(stores), of=type_.of if type_.shape == "kept" else "", matrix=matrix)

    def array(self, type_: Type) -> Field:
        """A new scratch array for the elements of a type."""
        storage = "float32" if type_.dtype == "float" else "int32"
        of = type_.of if type_.shape == "kept" else ""
        number = len(self.kernel.own)
        f = Field(f"a{number}", storage, 32, SCRATCH, of, None, type_.dims)
        self.kernel.own.append(f)
        return f

    def load(self, f: Field) -> Value:
        """A lane's element of an array."""
        kind = "i32" if f.storage == "int32" else "f32"
        return self.make("load", (), kind, "lane", f)

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
            self.kernel.steps.append(self.walk(type_, Store(SCRATCH, f, whole)))
            found = self.load(f)
            self.arrays[key] = self.truth(found) if value.kind == "bool" else found
        return self.arrays[key]

    # values

    def of(self, expr: Expr) -> Value:
        if id(expr) not in self.known:
            for e in walk(expr, into=lambda e: id(e) not in self.known and self.elementwise(e)):
                if id(e) not in self.known:
                    self.known[id(e)] = self.found(e)
        return self.known[id(expr)]

    def found(self, e: Expr) -> Value:
        if e.type.shape == "static":
            return self.static(e)
        if e.op in FOLDS and e.type.shape == "scalar":
            return self.total(e)
        if e.type.shape in ARRAYS and e.op in self.operations:
            return self.operations[e.op](self, e)
        if e.op in LIBRARY:
            return self.searched(e)
        for a in e.args:
            self.done[id(a)] = self.argument(a, e)
        wide = any(a.type.shape == "scalar" and a.type.dtype == "float" for a in e.args)
        return self.beside_numbers(e) if e.type.shape == "matrix" and wide else self.one(e)

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

    def beside_numbers(self, e: Expr) -> Value:
        """The value of a matrix and a number: both, and the result, are float64, as in the
        reference."""
        args = [self.done[id(a)] for a in e.args]
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
            raise Unsupported("reductions over groups or samples beside matrices or rounds", "", e)
        fold = self.fold(e)
        one = self.walk(x.type)
        one.folds.append(fold)
        self.kernel.steps.append(one)
        return self.make("total", [fold], "f64", "piece", fold.attr)

    def searched(self, e: Expr) -> Value:
        """A threshold or a table, with the steps that find it."""
        if e.op in TABLES:
            self.known[id(e)] = self.one(e)
            self.kernel.steps += tables.steps(self, e)
            return self.known[id(e)]
        self.kernel.steps.append(self.thresholds.step(e))
        return self.done[id(e)]

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
        if any(v.level == "lane" and (v.op in OWN or received(v)) for v in order([value])):
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

    def op_lookup(self, e: Expr, kind: str, level: str) -> Value:
        if e.args[0].type.shape != "matrix":
            return super().op_lookup(e, kind, level)
        index, row = self.argument(e.args[1], e), e.args[0]
        if row.op == "field" and not (self.own or self.summed) and row.type.dims[1].op == "const":
            f = self.fields[str(row.value)]
            if f.storage == "float32":  # its bytes are a table
                table = self.make("load", (), "table", "piece", f)
                size = int(row.type.dims[1].value)
                return self.make("lookup", [table, index], "f32", level, size)
        last = self.do("sub", self.cols(e.args[0]), self.constant(1))
        low = self.do("max", index, self.constant(0))
        found = self.element(e.args[0], self.do("min", low, last))
        return found if kind == "f32" else self.make("convert", [found], kind, level)

    # selections

    def op_count_kept(self, e: Expr, kind: str, level: str) -> Value:
        self.operations[e.op](self, e)  # have them selected
        return super().op_count_kept(e, kind, level)

    def op_spread(self, e: Expr, kind: str, level: str) -> Value:
        found = super().op_spread(e, kind, level)
        self.kernel.steps += self.spread
        self.spread.clear()
        return found

    # states, fields, and sums over ranks

    def op_input(self, e: Expr, kind: str, level: str) -> Value:
        g = super().op_input(e, kind, level)
        return self.fed(g) if self.fed_states and self.module.feedback else g

    def op_state(self, e: Expr, kind: str, level: str) -> Value:
        if not self.fed_states:
            zero = self.make("const", (), "f32" if level == "lane" else "f64", "piece", 0.0)
            return self.lanes(zero) if level == "lane" else zero
        if e.type.shape != "matrix":
            return super().op_state(e, kind, level)
        fits = self.fits(e.type)
        place = self.do("where", fits, self.position(), self.constant(0))
        held = self.make("at", [place], "f32", "lane", self.states[str(e.value)])
        return self.do("where", fits, held, self.constant(0.0), kind="f32")

    def fits(self, type_: Type) -> Value:
        """Condition that a piece has room for a state that is a matrix."""
        pool, whole = self.module.pool, Type("int", "static")
        rows, cols = (pool.make("max", (d, pool.const(1)), whole) for d in type_.dims)
        n = pool.make("param", (), whole, "n")
        size = pool.make("mul", (rows, cols), whole)
        return self.static(pool.make("le", (size, n), Type("bool", "static")))

    def op_field(self, e: Expr, kind: str, level: str) -> Value:
        return self.operations[e.op](self, e)

    op_combined = op_field


def own(value: Value) -> bool:
    """True for an element of a scratch array."""
    return isinstance(value.attr, Field) and value.attr.shape == SCRATCH


def received(value: Value) -> bool:
    """True for a value that is read from a payload, where it may start at any byte."""
    return isinstance(value.attr, Field) and value.attr.expr is not None
