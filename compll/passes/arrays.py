"""Expressions that mix elements as steps: matrices, transforms, drawn selections, rounds.

An expression of single elements is a value of lanes, and stands in the walk that needs it. An
operator that mixes elements is a call (see ROUTINES in ir/tile.py), which fills a scratch array.
Both are made on first use, so steps stand in the order in which values need each other.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from compll.ir.expr import Expr, Type, walk
from compll.ir.matrices import NARROW, short
from compll.ir.module import POSITIONS, WHOLE, Field, Module, Selection
from compll.ir.program import LIBRARY, TABLES, Unsupported
from compll.ir.tile import (
    ALL,
    SCRATCH,
    Call,
    Extents,
    Kernel,
    Store,
    Stream,
    Value,
    View,
    Walk,
    order,
)
from compll.numerics.matrices import DRAW
from compll.passes import tables
from compll.passes.selections import compact
from compll.passes.thresholds import Thresholds
from compll.passes.values import FOLDS, KINDS, Values

#: shapes that have elements
ARRAYS = ("n", "kept", "matrix")
#: operators whose elements depend on other elements of their arguments
MIXING = (
    "field", "combined", "random_matrix", "gather", "indices", "matrix", "flat", "transpose",
    "take_columns", "matmul", "hadamard", "scatter", "in", "orthonormal", "left_vectors",
    "right_vectors", "singular_values", "chosen", "sum_by", "row_max", "row_min", "top_columns",
    "place_columns", "ones",
)  # fmt: skip
#: instructions whose results only the lane itself has: other places cannot be read
OWN = ("draw", "position", "unpack", "selected", "spread", "at", "fold", "count")
VECTORS = ("left_vectors", "singular_values", "right_vectors")


@dataclass(frozen=True)
class Placed:
    """A result that is zero outside a selection: its places and values."""

    selection: str
    place: Value
    value: Value


class Arrays(Values):
    """Values of a kernel; adds steps to the kernel as values need them.

    fed: states are available. alone: this rank's fields stand for the combined ones; else the sums
    over ranks are given. own: `field` is the value that this rank stores, not the payload's.
    """

    def __init__(
        self, module: Module, kernel: Kernel, *, fed: bool, alone: bool = False, own: bool = False
    ) -> None:
        super().__init__(module, kernel)
        self.fed_states, self.alone, self.own = fed, alone, own
        self.known: dict[int, Value] = {}
        self.arrays: dict[Hashable, Value] = {}
        self.spectra: dict[tuple[int, str], Value] = {}
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
            for e in walk(expr, into=lambda e: id(e) not in self.known and elementwise(e)):
                if id(e) not in self.known:
                    self.known[id(e)] = self.found(e)
        return self.known[id(expr)]

    def found(self, e: Expr) -> Value:
        if e.type.shape == "static":
            return self.static(e)
        if e.op in FOLDS and e.type.shape == "scalar":
            return self.total(e)
        if e.type.shape in ARRAYS and e.op in MIXING:
            found: Value = getattr(self, f"array_{e.op}")(e)
            return found
        if e.op in LIBRARY:
            return self.searched(e)
        for a in e.args:
            self.done[id(a)] = self.argument(a, e)
        wide = any(a.type.shape == "scalar" and a.type.dtype == "float" for a in e.args)
        return self.beside_numbers(e) if e.type.shape == "matrix" and wide else self.one(e)

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

    def array_matrix(self, e: Expr) -> Value:
        self.kernel.rooms["matrix", e.type.dims] = None
        return self.element(e, self.position())

    def array_flat(self, e: Expr) -> Value:
        (x,) = e.args
        self.kernel.rooms["flat", x.type.dims] = None
        value = self.of(x)
        return value if value.op == "load" and own(value) else self.stored_array(value, x.type)

    def array_transpose(self, e: Expr) -> Value:
        (x,) = e.args
        if any(d.op == "const" and d.value == 1 for d in x.type.dims):
            return self.of(x)  # the same memory
        row, column = self.place(e.type.dims)
        return self.element(x, self.do("add", self.do("mul", column, self.cols(x)), row))

    def array_take_columns(self, e: Expr) -> Value:
        x, at = e.args
        row, column = self.place(e.type.dims)
        position = self.of(at)
        if at.type.dims[0] is not e.type.dims[0]:
            position = self.element(at, column)
        cols, zero = self.cols(x), self.constant(0)
        inside = self.do(
            "and", self.do("ge", position, zero, kind="bool"),
            self.do("lt", position, cols, kind="bool"), kind="bool",
        )  # fmt: skip
        near = self.do("where", inside, position, zero)
        found = self.element(x, self.do("add", self.do("mul", row, cols), near))
        return self.do("where", inside, found, self.constant(0.0), kind="f32")

    def op_lookup(self, e: Expr, kind: str, level: str) -> Value:
        if e.args[0].type.shape != "matrix":
            return super().op_lookup(e, kind, level)
        index = self.argument(e.args[1], e)
        last = self.do("sub", self.cols(e.args[0]), self.constant(1))
        low = self.do("max", index, self.constant(0))
        found = self.element(e.args[0], self.do("min", low, last))
        return found if kind == "f32" else self.make("convert", [found], kind, level)

    def array_random_matrix(self, e: Expr) -> Value:
        u = self.make("draw", (), "f32", "lane", DRAW)
        twice = self.do("mul", self.constant(2.0), u, kind="f32")
        return self.do("sub", twice, self.constant(1.0), kind="f32")

    def array_ones(self, e: Expr) -> Value:
        return self.lanes(self.constant(1.0))

    # selections

    def positions(self, name: str) -> Value:
        """Positions of the elements of a selection."""
        s = next(s for s in self.module.selections if s.name == name)
        if id(s) not in self.arrays:
            self.arrays[id(s)] = self.drawn(s) if s.kind == "drawn" else self.selected(s)
        return self.arrays[id(s)]

    def drawn(self, s: Selection) -> Value:
        """Positions that all ranks draw."""
        f = self.array(Type("int", "kept", s.name))
        self.kernel.steps.append(Call("drawn", (), (f,), numbers=(self.kernel.limits[s.name],)))
        return self.load(f)

    def selected(self, s: Selection) -> Value:
        """Positions that a walk collects."""
        if s.threshold is not None:
            self.of(s.threshold)
        one = compact(self, self.thresholds, s)
        f = Field(f"{s.name}.0", "int32", 32, "kept", s.name)
        one.parts.append((f, self.position()))
        self.kernel.steps.append(Walk(compacts=[one], of=s.of))
        return self.load(f)

    def op_count_kept(self, e: Expr, kind: str, level: str) -> Value:
        self.positions(str(e.value or e.type.of))
        return super().op_count_kept(e, kind, level)

    def op_spread(self, e: Expr, kind: str, level: str) -> Value:
        found = super().op_spread(e, kind, level)
        self.kernel.steps += self.spread
        self.spread.clear()
        return found

    def array_indices(self, e: Expr) -> Value:
        return self.positions(str(e.value))

    def array_gather(self, e: Expr) -> Value:
        """The selected elements as an array: several walks read it, and states change before the
        last."""
        (x,), place = e.args, self.positions(str(e.value))
        return self.stored_array(self.moved(self.lanes(self.of(x)), place, x.type), e.type)

    def array_in(self, e: Expr) -> Value:
        place = self.positions(str(e.value))
        one = self.lanes(self.make("const", (), "i32", "piece", 1))
        type_ = replace(e.type, dtype="int")
        f = self.filled(type_, Type("int", "kept", str(e.value)), one, place)
        return self.truth(self.load(f))

    def array_scatter(self, e: Expr) -> Value:
        found = self.placed(e)
        return self.load(self.filled(e.type, e.args[1].type, found.value, found.place))

    def placed(self, e: Expr) -> Placed:
        """The values that a scatter writes, and their places."""
        place, value = (self.lanes(self.of(a)) for a in e.args)
        return Placed(e.args[0].type.of, place, value)

    def filled(self, type_: Type, of: Type, value: Value, place: Value) -> Field:
        """A new array of zeros, with some lanes stored at their places."""
        f = self.array(type_)
        zero = self.lanes(self.make("const", (), value.kind, "piece", 0))
        self.kernel.steps.append(self.walk(type_, Store(SCRATCH, f, zero)))
        self.kernel.steps.append(self.walk(of, Store(SCRATCH, f, value, place=place)))
        return f

    # calls

    def view(self, e: Expr) -> View:
        """The array that a routine reads for an expression."""
        if e.op == "transpose":
            before = self.view(e.args[0])
            return replace(before, matrix=self.extents(e.type.dims), turned=not before.turned)
        if e.type.shape != "matrix":
            return View(self.plain(self.lanes(self.of(e)), e.type))
        made = self.extents(e.type.dims)
        if e.op == "matrix":
            self.kernel.rooms["matrix", e.type.dims] = None
            return View(self.plain(self.lanes(self.of(e.args[0])), e.args[0].type), made, ends=True)
        if e.op in ("abs", "neg"):
            inner = self.view(e.args[0])
            return replace(inner, value=self.make(e.op, [inner.value], "f32", "lane"))
        return View(self.plain(self.of(e), e.type), made)

    def plain(self, value: Value, type_: Type) -> Value:
        """The value in a form that routines can read at any place: made of loads, else stored in an
        array."""
        mixed = any(v.op in OWN and v.level == "lane" for v in order([value]))
        return self.stored_array(value, type_) if mixed or value.kind == "bool" else value

    def call(
        self, e: Expr, *args: Expr, routine: str = "", attr: int = 0,
        numbers: tuple[Value, ...] = (),
    ) -> Value:  # fmt: skip
        """An array that a routine makes. Equal calls share it."""
        views = tuple(map(self.view, args))
        matrix = self.extents(e.type.dims) if e.type.shape == "matrix" else None
        key = (routine or e.op, views, matrix, attr, numbers)
        if key not in self.arrays:
            f = self.array(e.type)
            self.kernel.steps.append(Call(routine or e.op, views, (f,), matrix, numbers, attr))
            self.arrays[key] = self.load(f)
        return self.arrays[key]

    def array_matmul(self, e: Expr) -> Value:
        a, b = e.args
        width = b.type.dims[1]
        if not short(e) and not (width.op == "const" and int(width.value) <= NARROW):
            self.solid(a)  # read again for every few columns
        self.solid(b)
        return self.call(e, a, b, routine="product", attr=int(short(e)))

    def solid(self, e: Expr) -> None:
        """Have the elements of a matrix stored in memory."""
        while e.op in ("transpose", "matrix"):
            (e,) = e.args
        if elementwise(e):
            self.known[id(e)] = self.stored_array(self.lanes(self.of(e)), e.type)

    def array_hadamard(self, e: Expr) -> Value:
        return self.call(e, *e.args, attr=int(e.value or 0))

    array_orthonormal = array_row_max = array_row_min = array_hadamard
    array_top_columns = array_place_columns = array_chosen = array_hadamard

    def array_sum_by(self, e: Expr) -> Value:
        index, x = e.args
        pool = self.module.pool
        size = pool.make("abs", (x,), x.type)
        largest = self.of(pool.make("reduce_max", (size,), Type("float", "scalar")))
        return self.call(e, index, x, numbers=(largest,))

    def array_left_vectors(self, e: Expr) -> Value:
        """Singular values or vectors, from a spectrum that is computed once."""
        (m,) = e.args
        if id(m) not in self.arrays:
            rows, cols = m.type.dims
            rank = self.module.pool.make("min", m.type.dims, Type("int", "static"))
            shapes = ((rows, rank), (self.module.pool.const(1), rank), (cols, rank))
            made = tuple(self.array(Type("float", "matrix", dims=dims)) for dims in shapes)
            view = self.view(m)
            self.kernel.steps.append(Call("spectrum", (view,), made, self.extents((rank, rank))))
            for op, f in zip(VECTORS, made, strict=True):
                self.spectra[id(m), op] = self.load(f)
            self.arrays[id(m)] = view.value
        return self.spectra[id(m), e.op]

    array_right_vectors = array_singular_values = array_left_vectors

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

    def array_field(self, e: Expr) -> Value:
        f = self.fields[str(e.value)]
        return self.stored_value(f, e) if self.own else self.read(f, e)

    def op_field(self, e: Expr, kind: str, level: str) -> Value:
        return self.array_field(e)

    def op_combined(self, e: Expr, kind: str, level: str) -> Value:
        return self.array_combined(e)

    def array_combined(self, e: Expr) -> Value:
        f = self.fields[str(e.value)]
        return self.stored_value(f, e) if self.alone else self.read_sum(f, e)

    def read_sum(self, f: Field, e: Expr) -> Value:
        """The mean over the ranks, or their maximum; see [Note: combined]."""
        given = summed(f)
        if all(f.name != given.name for f in self.kernel.added):
            self.kernel.added.append(given)
        given = next(f for f in self.kernel.added if f.name == given.name)
        found = self.read(given, e)
        if f.name in self.extremes:
            return found
        single = self.make("convert", [found], "f32", found.level)
        workers = self.make("workers", (), "f32", "piece")
        mean = self.make("div", [single, workers], "f32", found.level)
        return mean if found.level == "lane" else self.make("convert", [mean], "f64", found.level)

    def read(self, f: Field, e: Expr) -> Value:
        """A payload field's value."""
        if f.shape == "table":
            return self.make("load", (), "table", "piece", f)
        if f.layout.varying:
            positions = f.storage in POSITIONS
            array = Field(f.name, "int32", 0, "kept", f.of) if positions else self.bytes_of_trits(f)
            self.kernel.steps.append(Stream(f, array))
            if positions:
                return self.load(array)
            f = array
        scalar = e.type.shape not in ARRAYS
        level, whole = ("piece" if scalar else "lane"), f.packed or f.storage in WHOLE
        kind = ("i64" if whole else "f64") if scalar else "i32" if whole else "f32"
        found = self.make("unpack" if f.packed else "load", (), kind, level, f)
        return self.typed(found, e)

    def typed(self, found: Value, e: Expr) -> Value:
        """The value as a number of the expression's type."""
        wide = found.level == "piece"
        kind = {"float": "f64" if wide else "f32", "int": "i64" if wide else "i32"}.get(
            e.type.dtype, "bool"
        )
        if kind == "bool":
            return self.truth(found)
        return found if found.kind == kind else self.make("convert", [found], kind, found.level)

    def stored_value(self, f: Field, e: Expr) -> Value:
        """The value that a decoder reads of this rank's field. For a maximum it is the ranks' one,
        if given."""
        if f.name in self.extremes and self.own and not self.alone:
            return self.read_sum(f, e)
        value = self.leaving(f)
        if f.storage in ("float16", "bfloat16", "float8_e4m3"):
            value = self.make(f.storage, [value], value.kind, value.level)
        elif f.storage == "float32" and value.level == "piece":
            value = self.make("float32", [value], value.kind, value.level)
        return self.typed(value, e)

    def leaving(self, f: Field) -> Value:
        """The value that is stored in a payload field."""
        assert f.expr is not None
        value = self.of(f.expr)
        if f.shape == "table" or f.storage in POSITIONS:
            return value
        if f.expr.type.shape in ARRAYS:
            value = self.lanes(value)
        if f.packed and not f.trits:
            most = f.most or (1 << f.bits) - 1
            value = self.make(
                "code", [self.narrow(value, "lane")], "i32", value.level, most.bit_length()
            )
        elif f.storage in WHOLE or f.trits:
            value = self.whole(value) if value.kind == "bool" else value
        elif value.kind not in ("f32", "f64"):
            value = self.make("convert", [value], "f32", value.level)
        if f.name in self.extremes:
            # The all-reduce of a maximum may lose a NaN: see [Note: combined].
            infinite = self.make("const", (), value.kind, "piece", float("inf"))
            finite = self.make("isfinite", [value], "bool", value.level)
            value = self.make("where", [finite, value, infinite], value.kind, value.level)
        return value

    def store(self, f: Field) -> None:
        """Add the steps that store a payload field."""
        value = self.leaving(f)
        assert f.expr is not None
        if f.storage in POSITIONS:
            self.kernel.steps.append(Stream(f, value.attr))
            return
        if f.storage == "runs":
            array = self.bytes_of_trits(f)
            self.kernel.steps += [Walk([Store(SCRATCH, array, value)]), Stream(f, array)]
            return
        store = Store("payload", f, value)
        elements = f.shape not in ("scalar", "table")
        self.kernel.steps.append(self.walk(f.expr.type, store) if elements else store)


def elementwise(e: Expr) -> bool:
    """True if each element depends only on the same element of the arguments."""
    return e.type.shape in ARRAYS and e.op not in MIXING and bool(e.args)


def own(value: Value) -> bool:
    """True for an element of a scratch array."""
    return isinstance(value.attr, Field) and value.attr.shape == SCRATCH


def received(value: Value) -> bool:
    """True for a value that is read from a payload, where it may start at any byte."""
    return isinstance(value.attr, Field) and value.attr.expr is not None


def summed(f: Field) -> Field:
    """The field that holds the sum over the ranks of a payload field."""
    return replace(f, name=f.name + ALL)
