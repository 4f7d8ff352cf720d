"""Typed expressions as instructions of a tile program: levels and conversions become visible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from compll.errors import Diagnostic, Span, SpecError
from compll.ir.expr import Expr, walk
from compll.ir.module import POSITIONS, Field, Module
from compll.ir.storage import FLOAT32, INT32, STORAGES, Codes, Storage
from compll.ir.tile import ELEMENTS, Array, Domain, Kernel, Store, Value, Walk
from compll.numerics import draws
from compll.numerics.bits import NAN_KEY, order_key

# ---- refusal ------------------------------------------------------------------------------------
# Errors for specs that a backend refuses, at the binding of the spec that is to blame.


class Unsupported(Exception):
    """A shape of program that a backend does not compile; the message says which.

    name: the field or state in which it occurs. expr: the expression to blame.
    """

    def __init__(
        self, message: str, name: str = "", expr: Expr | None = None, hint: str = ""
    ) -> None:
        super().__init__(message)
        self.name, self.expr, self.hint = name, expr, hint


def refused(module: Module, target: str, why: Unsupported) -> SpecError:
    """The error for a program that the backend `target` does not compile."""
    message = f"the {target} backend does not compile {why}"
    return SpecError([Diagnostic(module.path or module.name, span(module, why), message, why.hint)])


def span(module: Module, why: Unsupported) -> Span:
    """The innermost binding that holds the refused expression; else the place of the field or
    section that needs it."""
    root = module.bindings.get(why.name)
    if why.expr is not None and root is not None:
        inside = set(walk(root))
        for name, value in module.bindings.items():
            if value in inside and any(e is why.expr for e in walk(value)):
                return module.spans[f"encode.{name}"]
    for place in (*(f"{s}.{why.name}" for s in ("update", "encode", "payload")), why.name):
        if place in module.spans:
            return module.spans[place]
    return module.spans.get("feedback", Span())


# ---- bounds -------------------------------------------------------------------------------------
# Bounds of instructions' values, by which other instructions take simpler forms.

Pair = tuple[float, float]
ANY: Pair = (-math.inf, math.inf)
WHOLE = (-(2.0**31), 2.0**31 - 1)
#: instructions that keep the order of values
RISING: dict[str, Callable[[float], Any]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "repeat": lambda x: x,
}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
KNOWN = {"exponent": (-127.0, 128.0), "draw": (0.0, 1.0), "trit": (0.0, 2.0)}


class Bounds:
    """The smallest and the largest value of instructions of 32 bits. A float may also be NaN."""

    def __init__(self) -> None:
        self.pairs: dict[Value, Pair] = {}

    def of(self, v: Value) -> Pair:
        """The bounds of a value; infinite ones if nothing is known."""
        stack = [v]
        while stack:
            top = stack[-1]
            missing = [a for a in top.args if a not in self.pairs]
            if missing:
                stack += missing
                continue
            stack.pop()
            self.pairs[top] = self._fitting(top)
        return self.pairs[v]

    def within(self, v: Value, low: float, high: float) -> bool:
        """True if a value is never outside of these bounds."""
        pair = self.of(v)
        return low <= pair[0] and pair[1] <= high

    def _fitting(self, v: Value) -> Pair:
        """The bounds, unless an integer may wrap around."""
        if v.kind == "bool":
            return 0.0, 1.0
        low, high = _own(v, [self.pairs[a] for a in v.args])
        if v.kind == "f32":
            return (low, high) if low <= high else ANY  # NaN
        return (low, high) if v.kind == "i32" and WHOLE[0] <= low <= high <= WHOLE[1] else ANY


def _own(v: Value, args: list[Pair]) -> Pair:
    """The bounds from those of the arguments; those of integers as if they had no end."""
    if v.op == "const":
        return float(v.attr), float(v.attr)
    if v.op in KNOWN:
        return KNOWN[v.op]
    if v.op == "code":
        return 0.0, float((1 << v.attr) - 1)
    if v.op in ("unpack", "load"):
        return _stored(v)
    if v.op in ("min", "max"):
        return _extreme(v, *args)
    if v.op == "where":
        return min(a[0] for a in args[1:]), max(a[1] for a in args[1:])
    if v.op == "convert":
        whole = v.kind == "f32" and v.args[0].kind in ("i32", "bool")
        return _mapped(np.float32, args[0]) if whole else ANY
    if v.op == "neg":
        return -args[0][1], -args[0][0]
    if v.op == "exp2":
        return 0.0, math.inf
    if v.op in RISING:
        return _mapped(RISING[v.op], args[0])
    if v.op in BINARY:
        kind = np.float32 if v.kind == "f32" else np.float64
        return _corners(lambda a, b: BINARY[v.op](kind(a), kind(b)), *args)
    return _of_bits(v, args)


def _stored(v: Value) -> Pair:
    """The bounds of numbers in a field of whole ones."""
    storage = v.attr.storage
    if storage.packed:
        return 0.0, 2.0 if storage.trits else float((1 << storage.bits) - 1)
    return storage.whole or ANY


def _extreme(v: Value, a: Pair, b: Pair) -> Pair:
    """The bounds of the smaller or larger number. If the first is NaN, it is the second."""
    smaller = v.op == "min"
    low, high = ((min if smaller else max)(x, y) for x, y in zip(a, b, strict=True))
    if v.kind != "f32":
        return low, high
    return (low, b[1]) if smaller else (b[0], high)


def _of_bits(v: Value, args: list[Pair]) -> Pair:
    """The bounds of operators on bits of numbers that are not negative."""
    if v.op == "bitand" and max(a[0] for a in args) >= 0:
        return 0.0, min(a[1] for a in args if a[0] >= 0)
    if v.op == "shr" and args[0][0] >= 0:
        return 0.0, args[0][1]
    if v.op == "abs" and v.kind == "f32":
        return 0.0, max(abs(end) for end in args[0])
    return ANY


def _mapped(function: Callable[[float], Any], ends: Pair) -> Pair:
    return float(function(ends[0])), float(function(ends[1]))


def _corners(function: Callable[[float, float], float], a: Pair, b: Pair) -> Pair:
    """The bounds of a function that has its extremes at ends of both arguments."""
    with np.errstate(all="ignore"):
        result = [float(function(x, y)) for x in a for y in b]
    return ANY if any(math.isnan(x) for x in result) else (min(result), max(result))


# ---- values -------------------------------------------------------------------------------------

KINDS = {"float": "f32", "int": "i32", "bool": "bool"}
WIDE = {"float": "f64", "int": "i64", "bool": "bool"}
SHAPES = {
    "n": "element",
    "kept": "element",
    "matrix": "element",
    "group": "tile",
    "scalar": "piece",
    "table": "piece",
    "static": "piece",
}
FOLDS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


Args = Sequence[Value]


class Values:
    """Typed expressions as instructions; equal expressions share one instruction."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.fields = {f.name: f for f in module.fields}
        self.states = {s.name: Array.of(s, "state") for s in module.states}
        self.made: dict[Any, Value] = {}
        self.bounds = Bounds()
        #: for each `adjust`, the number of elements that reach its threshold, as float64
        self.counts: dict[Expr, Value] = {}
        #: number of arrays that collect the values that decode spreads, and of tables
        self.spreads = self.tables = 0

    def make(
        self, op: str, args: Iterable[Value], kind: str, level: str, attr: Any = None
    ) -> Value:
        """The only instruction with these parts."""
        args = tuple(args)
        constant = attr if isinstance(attr, Array) else (attr.__class__, repr(attr))
        key = (op, *args, kind, level, constant)
        if key not in self.made:
            self.made[key] = Value(op, args, kind, level, attr)
        return self.made[key]

    def of(self, expr: Expr) -> Value:
        """The value that computes an expression (see Arrays)."""
        raise NotImplementedError

    def of_op(self, e: Expr, args: Args) -> Value:
        """The value of an operator, given its arguments' values."""
        level = SHAPES[e.type.shape]
        if e.op in FOLDS and level == "tile":
            fold = self.fold(e)
            return fold if fold.kind == "f32" else self.make("convert", [fold], "f32", "tile")
        special = getattr(self, f"op_{e.op}", None)
        kind = (WIDE if level == "piece" else KINDS).get(e.type.dtype, "")
        kind = "table" if e.type.shape == "table" else kind
        if special is not None:
            result: Value = special(e, args, kind, level)
            return result
        op = "where" if e.op == "choose" else e.op
        return self.make(op, [self.narrow(a, level) for a in args], kind, level)

    def narrow(self, value: Value, level: str) -> Value:
        """A piece's number as 32 bits, for values per element or tile."""
        if level == "piece" or value.kind not in ("f64", "i64"):
            return value
        if value.op == "const":
            kind = {"f64": "f32", "i64": "i32"}[value.kind]
            return self.make("const", (), kind, "piece", value.attr)
        kind = {"f64": "f32", "i64": "i32"}[value.kind]
        return self.make("convert", [value], kind, "piece")

    def order_key(self, x: Value) -> Value:
        """An int32 that orders as a float32 does (see bits.order_key). The bits of a magnitude
        need no more than one key for every NaN."""
        if x.op != "abs":
            return self.make("order_key", [x], "i32", x.level)
        nan = self.make("const", (), "i32", "piece", NAN_KEY)
        bits = self.make("float_bits", [x], "i32", x.level)
        return self.make("min", [bits, nan], "i32", x.level)

    def per_element(self, value: Value) -> Value:
        """The value per element; one of a lower level is repeated."""
        if value.level == "element":
            return value
        value = self.narrow(value, "element")
        return self.make("repeat", [value], value.kind, "element")

    def static(self, e: Expr) -> Value:
        """A number that the host knows: a constant, or an entry of the piece's row of statics."""
        inner = e
        while inner.op in ("float", "int", "lift") and inner.args:
            inner = inner.args[0]
        kind = WIDE[e.type.dtype]
        if inner.op == "const" and e.type.dtype in ("float", "int"):
            number = float(inner.value) if kind == "f64" else int(inner.value)
            return self.make("const", (), kind, "piece", number)
        index = next((i for i, s in enumerate(self.kernel.statics) if s is e), None)
        if index is None:
            index = len(self.kernel.statics)
            self.kernel.statics.append(e)
        return self.make("static", (), kind, "piece", index)

    def fold(self, e: Expr) -> Value:
        """A tile's sum, in the order of [Note: order of sums], or its largest or smallest value.

        The sum of a condition is a count, which needs no order.
        """
        arg = self.per_element(self.of(e.args[0]))
        if e.op == "reduce_sum" and arg.op == "convert":
            inner = arg.args[0]
            inner = inner.args[0] if inner.op == "convert" else inner
            if inner.kind == "bool":
                return self.make("fold", [inner], "i32", "tile", "count")
        return self.make("fold", [arg], "f32", "tile", FOLDS[e.op])

    def whole(self, condition: Value) -> Value:
        """A condition as 0 or 1."""
        return self.make("convert", [condition], "i32", condition.level)

    def truth(self, number: Value) -> Value:
        """True for an integer that is not 0."""
        zero = self.make("const", (), "i32", "piece", 0)
        return self.make("ne", [number, zero], "bool", number.level)

    # operators that need more than the instruction of their name

    def op_lift(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        (value,) = args
        return self.narrow(value, level) if level != "piece" else value

    def op_float(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        return self.make("convert", args, kind, level)

    op_int = op_float

    def op_div(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        """A quotient. By a power of two, it is the product with the inverse, which is exact."""
        a, b = (self.narrow(each, level) for each in args)
        if kind == "f32" and b.op == "exp2":
            inverse = self.inverse(b, level)
            if inverse is not None:
                return self.make("mul", [a, inverse], kind, level)
        return self.make("div", [a, b], kind, level)

    def inverse(self, power: Value, level: str) -> Value | None:
        """1 / 2**i; None if it takes a division for each element of the level. 2**-127 is not a
        normal number, and so not of `exp2`."""
        (i,) = power.args
        if self.bounds.within(i, -126, 126):
            below = self.make("neg", [i], i.kind, i.level)
            return self.make("exp2", [below], power.kind, power.level)
        unit = self.make("const", (), power.kind, "piece", 1.0)
        shared = power.level != level
        return self.make("div", [unit, power], power.kind, power.level) if shared else None

    def op_trunc(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        (value,) = args
        whole = value.kind not in ("f32", "f64")
        return self.make("convert" if whole else "trunc", [value], kind, level)

    def op_uniform(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        return self.make("draw", (), "f32", "element", int(e.value))

    def op_shared(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        return self.make("draw", (), "f32", "element", draws.SHARED - int(e.value))

    def op_group_size(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        return self.make("count", (), kind, level)

    def op_code(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        return self.code(self.fields[str(e.value)], args[0])

    def code(self, f: Field, value: Value) -> Value:
        """The code that a packed field stores for a value. Codes are rounded down, so `floor` is
        left out."""
        if f.layout.trits:
            return value  # it is a code already
        if value.op == "floor":
            (value,) = value.args
        most = f.most or (1 << f.bits) - 1
        value = self.narrow(value, "element")
        return self.make("code", [value], "i32", value.level, most.bit_length())

    def scratch(self, name: str, storage: Storage, domain: Domain = ELEMENTS) -> Array:
        """An array of the kernel's own."""
        result = Array(name, "scratch", storage, domain)
        if result not in self.kernel.scratch:
            self.kernel.scratch.append(result)
        return result

    def contents(self, f: Field) -> Array:
        """The array that a field of varying length is made into: its positions, or its codes."""
        if f.storage in POSITIONS:
            return self.scratch(f.name, INT32, Domain(f.shape, f.of))
        return self.scratch(f.name, STORAGES["trit"] if f.layout.trits else Codes(bits=8))

    def op_spread(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        inside, value = map(self.per_element, args)
        array = value.attr if value.op == "load" else None
        if not (isinstance(array, Array) and array.storage == FLOAT32):
            kept = Domain("kept", e.args[1].type.of)
            array = self.scratch(f"spread {self.spreads}", FLOAT32, kept)
            self.spreads += 1
            if value.kind != "f32":
                value = self.make("convert", [value], "f32", "element")
            self.kernel.steps.append(Walk([Store(array, value)], domain=kept))
        return self.make("spread", [inside], "f32", "element", array)

    def op_adjusted_count(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        return self.counts[e.args[0]]

    def op_quantiles(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        table = Array(f"table {self.tables}", "scratch", FLOAT32, Domain("table", e.type.of))
        self.tables += 1
        return self.make("table", (), "table", "piece", table)

    def op_literal(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        return self.make("table", (), kind, level, e.value)  # nobody's: see op_bucket, op_lookup

    def op_bucket(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        x, edges = args
        key = self.order_key(self.narrow(x, "element"))
        if e.args[1].op == "literal":
            result = self.reached(key, order_key(np.array(e.args[1].value, np.float32)).tolist())
            return result if kind == "i32" else self.make("convert", [result], kind, level)
        size = int(e.args[1].type.of)
        search = self.make("buckets", [edges], "table", "piece", size)
        result = self.make("bucket", [key, search], "i32", level, size)
        return result if kind == "i32" else self.make("convert", [result], kind, level)

    def op_lookup(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        table, index = args
        if e.args[0].op == "literal":
            result = self.one_of(index, e.args[0].value, 0)
            return result if kind == "f32" else self.make("convert", [result], kind, level)
        result = self.make("lookup", [table, index], "f32", level, int(e.args[0].type.of))
        return result if kind == "f32" else self.make("convert", [result], kind, level)

    def reached(self, key: Value, edges: Sequence[int]) -> Value:
        """Number of edges that an order key reaches: one comparison each, without a table."""
        ends = [self.make("const", (), "i32", "piece", edge) for edge in edges]
        passed = [self.whole(self.make("ge", [key, end], "bool", key.level)) for end in ends]
        return reduce(lambda a, b: self.make("add", [a, b], "i32", key.level), passed)

    def one_of(self, index: Value, numbers: Sequence[float], first: int) -> Value:
        """The number at an index, of those from `first` on: halved by comparisons."""
        if len(numbers) == 1:
            return self.make("const", (), "f32", "piece", numbers[0])
        half = len(numbers) // 2
        middle = self.make("const", (), index.kind, "piece", first + half)
        low, high = (
            self.one_of(index, part, at)
            for part, at in ((numbers[:half], first), (numbers[half:], first + half))
        )
        above = self.make("ge", [index, middle], "bool", index.level)
        return self.make("where", [above, high, low], "f32", index.level)

    def op_float32(self, e: Expr, args: Args, kind: str, level: str) -> Value:
        (value,) = args
        return value if kind == "f32" else self.make("float32", [value], kind, level)
