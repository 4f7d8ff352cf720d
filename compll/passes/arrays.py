"""Expressions as values and steps: ask for a value, and its steps appear in the order of need.

An expression of single elements is a value per element, and stands in the walk that needs it. A
total, a search and a selection are steps. An operator that mixes elements is a call of a routine,
which fills a scratch array. fusion.py orders and joins the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compll.ir.expr import LIBRARY, Expr, Type, walk
from compll.ir.module import POSITIONS, WHOLE, Field, Module
from compll.ir.static import NARROW, short
from compll.ir.storage import FLOAT32, INT32
from compll.ir.tile import (
    ELEMENTS,
    GRADIENT,
    Array,
    Call,
    Compact,
    Domain,
    Extents,
    Kernel,
    Op,
    Store,
    Value,
    View,
    Walk,
    When,
    count_of,
    order,
    order_inside,
)
from compll.numerics.bits import FORMATS
from compll.numerics.matrices import DRAW
from compll.numerics.numbers import TRIES
from compll.passes.values import FOLDS, KINDS, SHAPES, Args, Unsupported, Values

# ---- searches -----------------------------------------------------------------------------------
# Searches: the k-th largest, thresholds found by counting the elements above them, quantiles.


class Searches:
    """The searches of an encode. kth: searches for the k-th largest, by their expressions.

    guards: conditions without which a step is not needed; see lower.py.
    """

    def __init__(self, values: Values, guards: Mapping[Expr, tuple[Expr, bool]]) -> None:
        self.values, self.guards = values, guards
        self.kth: dict[Expr, Call] = {}

    def guarded(self, e: Expr, step: Op) -> Op:
        """A step, under the condition of its value if it has one."""
        guard = self.guards.get(e)
        if guard is None:
            return step
        condition, wanted = guard
        return When(self.values.of(condition), wanted, [step])

    def step(self, e: Expr) -> tuple[Op, Value]:
        """A search, and its result."""
        if e.op == "quantiles":
            return self.quantiles(e)
        return self.kth_largest(e) if e.op == "kth_largest" else self.threshold(e)

    def results(self, name: str, *kinds: str) -> tuple[Value, ...]:
        """The values of the piece that a search of this name computes."""
        numbers = enumerate(kinds)
        return tuple(
            self.values.make("result", (), kind, "piece", f"{name}.{k}") for k, kind in numbers
        )

    def kth_largest(self, e: Expr) -> tuple[Op, Value]:
        """The k-th largest of all elements, or of a sample."""
        values, (x, k) = self.values, e.args
        sample, of = None, x.type.of if x.type.shape == "kept" else ""
        whole = values.kernel.counts[of]
        if x.op == "sample":
            x, count = x.args
            sample = self.count(count, whole)
        view = View(values.order_key(values.per_element(values.of(x))), of=of)
        keys = values.scratch(f"keys {len(self.kth)}", INT32)
        samples = [
            values.scratch(f"sample of {a.name}", a.storage) for a in sampled(view) or [keys]
        ]
        numbers = (self.count(k, sample or whole), *([sample] if sample is not None else []))
        results = self.results(keys.name, "i32", "i64")
        step = Call(e.op, (view,), (keys, *samples), numbers=numbers, results=results)
        self.kth[e] = step
        single = values.make("from_key", [results[0]], "f32", "piece")
        return step, values.make("convert", [single], "f64", "piece")

    def count(self, e: Expr, most: Value) -> Value:
        """A number of elements, 1..most."""
        least = self.values.make("const", (), "i64", "piece", 1)
        result = self.values.make("as_count", [self.values.of(e), most], "i64", "piece")
        return self.values.make("max", [result, least], "i64", "piece")

    def threshold(self, e: Expr) -> tuple[Op, Value]:
        """The step of adjust or bisect."""
        values = self.values
        view = View(values.per_element(values.of(e.args[0])))
        result, count = self.results(f"{e.op} {len(values.counts)}", "f64", "f64")
        values.counts[e] = count
        numbers = tuple(values.of(a) for a in e.args[1:])
        return Call(e.op, (view,), numbers=numbers, results=(result, count)), result

    def quantiles(self, e: Expr) -> tuple[Op, Value]:
        """The step that makes a table, after a walk that stores the keys."""
        values = self.values
        table = values.of_op(e, ())
        names = (f"{what} of {table.attr.name}" for what in ("keys", "near keys", "sorted keys"))
        keys, *made = (values.scratch(name, INT32) for name in names)
        key = values.order_key(values.per_element(values.of(e.args[0])))
        values.kernel.exprs.setdefault(key, e.args[0])
        values.kernel.steps.append(Walk([Store(keys, key)]))
        view = View(values.make("load", (), "i32", "element", keys))
        call = Call(e.op, (view,), tuple(made), results=(table,), attr=int(e.value))
        return call, table


def sampled(view: View) -> list[Array]:
    """The arrays of which a sample gives its keys; none if a key depends on its position, or the
    elements are selected ones."""
    elements = [v for v in order_inside([view.value]) if v.level == "element"]
    if view.of or any(v.op in ("draw", "position") for v in elements):
        return []
    return list(dict.fromkeys(v.attr for v in elements if v.op == "load"))


def of_sample(view: View, samples: Mapping[Array, Array]) -> Value:
    """The view's value, computed from samples of arrays."""
    made: dict[Value, Value] = {}
    for v in order_inside([view.value]):
        attr = samples.get(v.attr, v.attr) if v.op == "load" else v.attr
        args = v.args if v.level == "piece" else tuple(made[a] for a in v.args)
        made[v] = v if (args, attr) == (v.args, v.attr) else replace(v, args=args, attr=attr)
    return made[view.value]


def counting(view: View) -> tuple[Sequence[Value], Walk]:
    """The thresholds that a search tries at once ([Note: tries] in numerics/numbers.py), and the
    walk that counts the elements that reach each."""
    tried = [Value("try", (), "f32", "piece", q) for q in range(TRIES)]
    reached = [Value("ge", (view.value, t), "bool", "element") for t in tried]
    return tried, Walk(folds=[*map(count_of, reached)])


# ---- arrays -------------------------------------------------------------------------------------

#: shapes that have elements
ARRAYS = ("n", "kept", "matrix")
#: instructions whose results only the element itself has: other places cannot be read
OWN = (
    "draw", "position", "unpack", "selected", "spread", "at", "fold", "count", "bucket", "lookup",
)  # fmt: skip
#: the values of an operator that mixes elements
Operation = Callable[["Arrays", Expr], Value]


@dataclass
class Selecting:
    """A selection, the walk that selects, and arrays of the values that it captures.

    data_dependent: known for values: true if they are computed only after that walk.
    """

    compact: Compact
    walk: Walk
    parts: dict[Value, Array] = field(default_factory=dict)
    data_dependent: dict[Value, bool] = field(default_factory=dict)


class Arrays(Values):
    """Values of a kernel; adds steps to the kernel as values need them.

    with_states: states are available. alone: this rank's fields stand for the combined ones; else
    the sums over ranks are given. own: `field` is the value this rank stores, not the payload's.
    summed: it is the one that all ranks combined. operations: by name, those whose elements depend
    on other elements of their arguments. conditions: see lower.py.
    """

    def __init__(
        self, module: Module, kernel: Kernel, operations: Mapping[str, Operation], *,
        with_states: bool, alone: bool = False, own: bool = False, summed: bool = False,
        conditions: Mapping[Expr, tuple[Expr, bool]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, kernel)
        self.operations = operations
        self.with_states, self.alone, self.own, self.summed = with_states, alone, own, summed
        self.values_of: dict[Expr, Value] = {}
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
        self.kernel.matrices["", dims] = None
        result = Extents(dims, *map(self.number, (rows, cols, size)))
        return self.kernel.extents.setdefault(dims, result)

    def number(self, e: Expr) -> Value:
        """A static integer as a value of the piece."""
        if e.op in ("max", "mul") and all(a.op == "const" for a in e.args):
            sides = [int(a.value) for a in e.args]
            result = max(sides) if e.op == "max" else sides[0] * sides[1]
            return self.make("const", (), "i64", "piece", result)
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
        """An element of an array."""
        kind = "i32" if array.storage == INT32 else "f32"
        return self.make("load", (), kind, "element", array)

    def stored_array(self, value: Value, type_: Type) -> Value:
        """The value, loaded from a scratch array that a walk stores it in."""
        # equal values over other elements differ
        key = (value, type_.shape, type_.of, type_.dims)
        if key not in self.arrays:
            whole = self.whole(value) if value.kind == "bool" else value
            f = self.array(replace(type_, dtype="float" if whole.kind == "f32" else "int"))
            self.kernel.steps.append(self.walk(type_, Store(f, whole)))
            result = self.load(f)
            self.arrays[key] = self.truth(result) if value.kind == "bool" else result
        return self.arrays[key]

    # values

    def of(self, expr: Expr) -> Value:
        if expr not in self.values_of:
            for e in walk(expr, into=self.enters):
                if e not in self.values_of and e.type.shape in SHAPES:
                    value = self.values_of[e] = self.lowered(e)
                    self.kernel.exprs.setdefault(value, e)
        return self.values_of[expr]

    def enters(self, e: Expr) -> bool:
        """True if the arguments of an expression are values that it needs first."""
        fresh = e not in self.values_of and e.op not in self.operations
        return fresh and e.type.shape != "static"

    def lowered(self, e: Expr) -> Value:
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
            self.beside_numbers(e, args)
            if e.type.shape == "matrix" and wide
            else self.of_op(e, args)
        )

    def elementwise(self, e: Expr) -> bool:
        """True if each element depends on the same element of the arguments alone."""
        return e.type.shape in ARRAYS and e.op not in self.operations and bool(e.args)

    def argument(self, a: Expr, e: Expr) -> Value:
        """An argument's value. A single row or column repeats."""
        if a.type.shape == "matrix" and e.type.shape == "matrix" and a.type.dims != e.type.dims:
            row, column = self.place(e.type.dims)
            single = [d.op == "const" and d.value == 1 for d in a.type.dims]
            zero = self.make("const", (), "i32", "piece", 0)
            at = zero if all(single) else column if single[0] else row
            return self.element(a, self.per_element(at))
        return self.of(a)

    def beside_numbers(self, e: Expr, args: Args) -> Value:
        """The value of a matrix and a number: both, and the result, are float64, as in the
        reference."""
        args = [self.make("convert", [v], "f64", v.level) if v.kind == "f32" else v for v in args]
        op = "where" if e.op == "choose" else e.op
        if e.type.dtype == "bool":
            return self.make(op, args, "bool", "element")
        result = self.make(op, args, "f64", "element")
        return self.make("convert", [result], KINDS[e.type.dtype], "element")

    def total(self, e: Expr) -> Value:
        """The sum, maximum or minimum of an array."""
        (x,) = e.args
        if x.type.shape not in ARRAYS:
            raise Unsupported("reductions over groups or samples", "", e)
        fold = self.fold(e)
        fold_walk = self.walk(x.type)
        fold_walk.folds.append(fold)
        self.kernel.steps.append(self.searches.guarded(e, fold_walk))
        return self.make("total", [fold], "f64", "piece", fold.attr)

    def searched(self, e: Expr) -> Value:
        """A threshold or a table, with the step that finds it."""
        step, value = self.searches.step(e)
        self.kernel.steps.append(self.searches.guarded(e, step))
        return value

    # elements at other places

    def place(self, dims: tuple[Expr, ...]) -> tuple[Value, Value]:
        """The row and the column of an element of a matrix.

        The float64 quotient of integers below 2**53, rounded down, is exact.
        """
        at, cols = self.position(), self.extents(dims).cols
        wide, width = (self.do("convert", v, kind="f64") for v in (at, cols))
        quotient = self.do("floor", self.do("div", wide, width, kind="f64"), kind="f64")
        row = self.do("convert", quotient)
        return row, self.do("sub", at, self.do("mul", row, self.narrow(cols, "element")))

    def do(self, op: str, *args: Value, kind: str = "i32") -> Value:
        """An instruction: per element if an argument is, else per piece."""
        level = "element" if any(a.level == "element" for a in args) else "piece"
        return self.make(op, args, kind, level)

    def constant(self, number: float) -> Value:
        """A constant: int32 of an int, float32 of a float."""
        kind = "i32" if isinstance(number, int) else "f32"
        return self.make("const", (), kind, "piece", number)

    def position(self) -> Value:
        """The number of the element."""
        return self.make("position", (), "i32", "element")

    def cols(self, e: Expr) -> Value:
        """The number of columns of a matrix, as an int32."""
        return self.narrow(self.extents(e.type.dims).cols, "element")

    def moved(self, value: Value, place: Value, type_: Type) -> Value:
        """The value that the element at `place` has."""
        elements = [v for v in order([value]) if v.level == "element"]
        if any(v.op in OWN or (v.op == "load" and v.attr.received) for v in elements):
            value = self.stored_array(value, type_)
        return self.at(value, place)

    def at(self, value: Value, place: Value) -> Value:
        if value.level != "element":
            return value
        if value.op == "load":
            return self.make("at", [place], value.kind, "element", value.attr)
        args = [self.at(a, place) for a in value.args]
        return self.make(value.op, args, value.kind, value.level, value.attr)

    def element(self, e: Expr, place: Value) -> Value:
        """The element of a matrix at `place`; zero beyond the elements that the matrix was made
        of."""
        if e.op != "matrix":
            return self.moved(self.of(e), place, e.type)
        size = self.narrow(self.make("size", (), "i64", "piece"), "element")
        inside = self.do("lt", place, size, kind="bool")
        near = self.do("where", inside, place, self.constant(0))
        value = self.moved(self.per_element(self.of(e.args[0])), near, e.args[0].type)
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
        result = self.element(e.args[0], self.do("min", low, last))
        return result if kind == "f32" else self.make("convert", [result], kind, level)

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
            g = self.make("add", [g, self.incoming], "f32", "element")
        g = self.make("mul", [g, self.make("scale", (), "f32", "piece")], "f32", "element")
        if not (self.with_states and self.module.feedback):
            return g
        held = self.load(self.states[self.module.feedback_state])
        if self.module.differences:
            return self.make("sub", [g, held], "f32", "element")
        if self.module.decay != 1:
            held = self.make("mul", [held, self.constant(self.module.decay)], "f32", "element")
        return self.make("add", [g, held], "f32", "element")

    def op_state(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        kind = "f32" if level == "element" else "f64"
        if not self.with_states:
            zero = self.make("const", (), kind, "piece", 0.0)
            return self.per_element(zero) if level == "element" else zero
        f = self.states[str(e.value)]
        if e.type.shape != "matrix":
            return self.make("load", (), kind, level, f)
        fits = self.fits(e.type)
        place = self.do("where", fits, self.position(), self.constant(0))
        held = self.make("at", [place], "f32", "element", f)
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


# ---- array calls --------------------------------------------------------------------------------
# Calls of routines that mix elements, and views that they read.


def view(values: Arrays, e: Expr) -> View:
    """The array that a routine reads for an expression."""
    if e.op == "transpose":
        before = view(values, e.args[0])
        return replace(before, matrix=values.extents(e.type.dims), turned=not before.turned)
    if e.type.shape != "matrix":
        return View(plain(values, values.per_element(values.of(e)), e.type))
    made = values.extents(e.type.dims)
    if e.op == "matrix":
        values.kernel.matrices["matrix", e.type.dims] = None
        return View(
            plain(values, values.per_element(values.of(e.args[0])), e.args[0].type), made, ends=True
        )
    if e.op in ("abs", "neg"):
        inner = view(values, e.args[0])
        return replace(inner, value=values.make(e.op, [inner.value], "f32", "element"))
    return View(plain(values, values.of(e), e.type), made)


def plain(values: Arrays, value: Value, type_: Type) -> Value:
    """The value in a form that routines can read at any place: made of loads, else stored in an
    array."""
    mixed = any(v.op in OWN and v.level == "element" for v in order([value]))
    return values.stored_array(value, type_) if mixed or value.kind == "bool" else value


def call(
    values: Arrays, e: Expr, *args: Expr, routine: str = "", attr: int = 0,
    numbers: tuple[Value, ...] = (),
) -> Value:  # fmt: skip
    """An array that a routine makes. Equal calls share it."""
    views = tuple(view(values, x) for x in args)
    matrix = values.extents(e.type.dims) if e.type.shape == "matrix" else None
    key = (routine or e.op, views, matrix, attr, numbers)
    if key not in values.arrays:
        f = values.array(e.type)
        values.kernel.steps.append(Call(routine or e.op, views, (f,), matrix, numbers, attr=attr))
        values.arrays[key] = values.load(f)
    return values.arrays[key]


def matmul(values: Arrays, e: Expr) -> Value:
    a, b = e.args
    width = b.type.dims[1]
    if not short(e) and not (width.op == "const" and int(width.value) <= NARROW):
        solid(values, a)  # read again for every few columns
    solid(values, b)
    return call(values, e, a, b, routine="product", attr=int(short(e)))


def solid(values: Arrays, e: Expr) -> None:
    """Have the elements of a matrix stored in memory."""
    while e.op in ("transpose", "matrix"):
        (e,) = e.args
    if values.elementwise(e):
        values.values_of[e] = values.stored_array(values.per_element(values.of(e)), e.type)


def routine(values: Arrays, e: Expr) -> Value:
    return call(values, e, *e.args, attr=int(e.value or 0))


def sum_by(values: Arrays, e: Expr) -> Value:
    index, x = e.args
    pool = values.module.pool
    size = pool.make("abs", (x,), x.type)
    largest = values.of(pool.make("reduce_max", (size,), Type("float", "scalar")))
    return call(values, e, index, x, numbers=(largest,))


# ---- array matrices -----------------------------------------------------------------------------
# Matrices made of elements, and elements at other places of matrices.


def matrix(values: Arrays, e: Expr) -> Value:
    values.kernel.matrices["matrix", e.type.dims] = None
    return values.element(e, values.position())


def flat(values: Arrays, e: Expr) -> Value:
    (x,) = e.args
    values.kernel.matrices["flat", x.type.dims] = None
    value = values.of(x)
    stored = value.op == "load" and value.attr.role == "scratch"
    return value if stored else values.stored_array(value, x.type)


def transpose(values: Arrays, e: Expr) -> Value:
    (x,) = e.args
    if any(d.op == "const" and d.value == 1 for d in x.type.dims):
        return values.of(x)  # the same memory
    row, column = values.place(e.type.dims)
    return values.element(x, values.do("add", values.do("mul", column, values.cols(x)), row))


def take_columns(values: Arrays, e: Expr) -> Value:
    x, at = e.args
    row, column = values.place(e.type.dims)
    position = values.of(at)
    if at.type.dims[0] is not e.type.dims[0]:
        position = values.element(at, column)
    cols, zero = values.cols(x), values.constant(0)
    inside = values.do(
        "and", values.do("ge", position, zero, kind="bool"),
        values.do("lt", position, cols, kind="bool"), kind="bool",
    )  # fmt: skip
    near = values.do("where", inside, position, zero)
    result = values.element(x, values.do("add", values.do("mul", row, cols), near))
    return values.do("where", inside, result, values.constant(0.0), kind="f32")


def random_matrix(values: Arrays, e: Expr) -> Value:
    u = values.make("draw", (), "f32", "element", DRAW)
    twice = values.do("mul", values.constant(2.0), u, kind="f32")
    return values.do("sub", twice, values.constant(1.0), kind="f32")


def ones(values: Arrays, e: Expr) -> Value:
    return values.per_element(values.constant(1.0))


# ---- array fields -------------------------------------------------------------------------------
# Payload fields in kernels that mix elements, and sums of them over ranks.


def payload_field(values: Arrays, e: Expr) -> Value:
    """A payload field's value: combined over ranks, this rank's own, or as the payload holds it."""
    f = values.fields[str(e.value)]
    if values.summed:
        return read_sum(values, f, e)
    return stored_value(values, f, e) if values.own else read(values, f, e)


def combined(values: Arrays, e: Expr) -> Value:
    f = values.fields[str(e.value)]
    return stored_value(values, f, e) if values.alone else read_sum(values, f, e)


def read_sum(values: Arrays, f: Field, e: Expr) -> Value:
    """The mean over the ranks, or their maximum; see [Note: combined]."""
    given = Array.of(f, "sum")
    if given not in values.kernel.sums:
        values.kernel.sums.append(given)
    result = loaded(values, given, e)
    if f.name in values.extremes:
        return result
    single = values.make("convert", [result], "f32", result.level)
    workers = values.make("workers", (), "f32", "piece")
    mean = values.make("div", [single, workers], "f32", result.level)
    if result.level == "element":
        return mean
    return values.make("convert", [mean], "f64", result.level)


def read(values: Arrays, f: Field, e: Expr) -> Value:
    """The value of an incoming payload's field."""
    array = read_stream(values, f) if f.layout.varying else Array.of(f, "incoming")
    return loaded(values, array, e)


def read_stream(values: Arrays, f: Field) -> Array:
    """The array that an incoming field of varying length is made into, by a call that is added on
    first use."""
    array, steps = values.contents(f), values.kernel.steps
    if not any(isinstance(step, Call) and array in step.made for step in steps):
        steps.append(Call(f.storage, made=(array,), attr=f))
    return array


def loaded(values: Arrays, array: Array, e: Expr) -> Value:
    """The value of an array that has the values of a payload field."""
    if array.domain.kind == "table":
        return values.make("load", (), "table", "piece", array)
    level, storage = SHAPES[e.type.shape], array.storage
    whole = storage.packed or storage.whole is not None
    kind = ("i64" if whole else "f64") if level == "piece" else "i32" if whole else "f32"
    result = values.make("unpack" if storage.packed else "load", (), kind, level, array)
    return typed(values, result, e)


def typed(values: Arrays, value: Value, e: Expr) -> Value:
    """The value as a number of the expression's type."""
    wide = value.level == "piece"
    kind = {"float": "f64" if wide else "f32", "int": "i64" if wide else "i32"}.get(
        e.type.dtype, "bool"
    )
    if kind == "bool":
        return values.truth(value)
    return value if value.kind == kind else values.make("convert", [value], kind, value.level)


def stored_value(values: Arrays, f: Field, e: Expr) -> Value:
    """The value that a decoder reads of this rank's field. For a maximum it is the ranks' one,
    if given."""
    if f.name in values.extremes and values.own and not values.alone:
        return read_sum(values, f, e)
    value = leaving(values, f)
    if f.shape == "table":
        return value
    if f.storage in FORMATS:
        value = values.make(f.storage, [value], value.kind, value.level)
    elif f.storage == "float32" and value.level == "piece":
        value = values.make("float32", [value], value.kind, value.level)
    return typed(values, value, e)


def leaving(values: Arrays, f: Field) -> Value:
    """The value that is stored in a payload field."""
    assert f.expr is not None
    value = values.of(f.expr)
    if f.shape == "table" or f.storage in POSITIONS:
        return value
    if f.expr.type.shape in ARRAYS:
        value = values.per_element(value)
    if f.packed and not f.layout.trits:
        value = values.code(f, value)
    elif f.storage in WHOLE or f.layout.trits:
        value = values.whole(value) if value.kind == "bool" else value
    elif value.kind not in ("f32", "f64"):
        value = values.make("convert", [value], "f32", value.level)
    if f.name in values.extremes:
        # The all-reduce of a maximum may lose a NaN: see [Note: combined].
        infinite = values.make("const", (), value.kind, "piece", float("inf"))
        finite = values.make("isfinite", [value], "bool", value.level)
        value = values.make("where", [finite, value, infinite], value.kind, value.level)
    return value


def store(values: Arrays, f: Field) -> None:
    """Add the steps that store a payload field."""
    value, made = leaving(values, f), Array.of(f, "payload")
    assert f.expr is not None
    if f.layout.recoded:
        array = values.contents(f)
        values.kernel.steps.append(Walk([Store(array, value)]))
        value = values.load(array)
    if f.layout.varying:
        length = values.kernel.sizes[made]
        step = Call(f.storage, (View(value),), (made,), results=(length,), attr=f)
        values.kernel.steps.append(step)
        return
    store = Store(made, value)
    elements = f.shape not in ("scalar", "table")
    values.kernel.steps.append(values.walk(f.expr.type, store) if elements else store)
