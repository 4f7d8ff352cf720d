"""From a program of passes to tile programs: levels and conversions become instructions.

What tile programs do not have yet raises NotLowered, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compll.ir.expr import Expr, walk
from compll.ir.layout import tile_of
from compll.ir.module import WHOLE, Field, Module
from compll.ir.program import Pass, Program, Sink
from compll.ir.tile import Kernel, NotLowered, Store, Value, Walk
from compll.passes.schedule import hops, schedule

KINDS = {"float": "f32", "int": "i32", "bool": "bool"}
WIDE = {"float": "f64", "int": "i64", "bool": "bool"}
SHAPES = {"n": "lane", "group": "tile", "scalar": "piece", "static": "piece"}
FOLDS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
#: instructions of the same name and meaning as the operator, by what they are of
ARITHMETIC = {"add", "sub", "mul", "neg", "abs", "min", "max", "sign", "where"}
FLOATS = ARITHMETIC | {
    "div", "floor", "ceil", "round", "sqrt", "exp", "log", "log2", "pow", "mod", "floordiv",
    "float16", "bfloat16", "bfloat16_up", "exp2",
}  # fmt: skip
WHOLES = ARITHMETIC | {
    "floordiv",
    "mod",
    "bitand",
    "bitor",
    "bitxor",
    "shl",
    "shr",
    "trunc",
    "exponent",
}
TRUTHS = {
    "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "isfinite", "isnan", "where",
}  # fmt: skip
BY_KIND = {
    "f32": FLOATS, "i32": WHOLES, "bool": TRUTHS,
    "f64": FLOATS - {"exp2"}, "i64": {"add", "sub", "mul", "neg"},
}  # fmt: skip


class _Values:
    """Typed expressions as instructions; equal ones are one."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.fields = {f.name: f for f in module.fields}
        self.states = {s.name: s for s in module.states}
        self.done: dict[int, Value] = {}
        self.made: dict[Any, Value] = {}
        self.incoming: Value | None = None

    def make(
        self, op: str, args: Iterable[Value], kind: str, level: str, attr: Any = None
    ) -> Value:
        """The one instruction with these parts."""
        args = tuple(args)
        known = id(attr) if isinstance(attr, Field) else (attr.__class__, repr(attr))
        key = (op, *map(id, args), kind, level, known)
        if key not in self.made:
            self.made[key] = Value(op, args, kind, level, attr)
        return self.made[key]

    def of(self, expr: Expr) -> Value:
        """The instruction that gives an expression's value."""
        for e in walk(expr, into=lambda e: id(e) not in self.done):
            if id(e) not in self.done and e.type.shape in SHAPES:
                self.done[id(e)] = self.one(e)
        return self.done[id(expr)]

    def one(self, e: Expr) -> Value:
        level = SHAPES[e.type.shape]
        if e.type.shape == "static":
            return self.static(e)
        if e.op in FOLDS and level == "tile":
            return self.fold(e)
        if e.op in FOLDS and e.args[0].type.shape == "n":
            return self.make("total", [self.fold(e)], "f64", "piece", FOLDS[e.op])
        special = getattr(self, f"op_{e.op}", None)
        kind = (WIDE if level == "piece" else KINDS).get(e.type.dtype, "")
        if special is not None:
            found: Value = special(e, kind, level)
            return found
        op = "where" if e.op == "choose" else e.op
        if op not in BY_KIND.get(kind, ()):
            raise NotLowered(f"{e.op} of {e.type}")
        args = [self.narrow(self.done[id(a)], level) for a in e.args]
        return self.make(op, args, kind, level)

    def narrow(self, value: Value, level: str) -> Value:
        """A piece's number as lanes and tiles compute with: 32 bits."""
        if level == "piece" or value.kind not in ("f64", "i64"):
            return value
        if value.op == "const":
            kind = {"f64": "f32", "i64": "i32"}[value.kind]
            return self.make("const", (), kind, "piece", value.attr)
        kind = {"f64": "f32", "i64": "i32"}[value.kind]
        return self.make("convert", [value], kind, "piece")

    def static(self, e: Expr) -> Value:
        """A number that the host knows: a constant, or one of the piece's row of statics."""
        inner = e
        while inner.op in ("float", "int", "lift") and inner.args:
            inner = inner.args[0]
        kind = WIDE[e.type.dtype]
        if inner.op == "const" and e.type.dtype in ("float", "int"):
            number = float(inner.value) if kind == "f64" else int(inner.value)
            return self.make("const", (), kind, "piece", number)
        known = next((i for i, s in enumerate(self.kernel.statics) if s is e), None)
        if known is None:
            known = len(self.kernel.statics)
            self.kernel.statics.append(e)
        return self.make("static", (), kind, "piece", known)

    def fold(self, e: Expr) -> Value:
        """A tile's sum, in the order of [Note: order of sums], or its largest or smallest value."""
        what = FOLDS[e.op]
        arg = self.of(e.args[0])
        return self.make("fold", [arg], "f32", "tile", what)

    # operators that are more than an instruction of their name

    def op_input(self, e: Expr, kind: str, level: str) -> Value:
        g = self.make("load", (), "f32", "lane", "g")
        if self.incoming is not None:
            g = self.make("add", [g, self.incoming], "f32", "lane")
        return self.make("mul", [g, self.make("scale", (), "f32", "piece")], "f32", "lane")

    def op_state(self, e: Expr, kind: str, level: str) -> Value:
        if level != "lane":
            raise NotLowered("a state per tensor")
        return self.make("load", (), "f32", "lane", self.states[str(e.value)])

    def op_lift(self, e: Expr, kind: str, level: str) -> Value:
        value = self.done[id(e.args[0])]
        return self.narrow(value, level) if level != "piece" else value

    def op_float(self, e: Expr, kind: str, level: str) -> Value:
        return self.make("convert", [self.done[id(e.args[0])]], kind, level)

    op_int = op_float

    def op_uniform(self, e: Expr, kind: str, level: str) -> Value:
        return self.make("draw", (), "f32", "lane", int(e.value))

    def op_group_size(self, e: Expr, kind: str, level: str) -> Value:
        return self.make("count", (), kind, level)

    def op_code(self, e: Expr, kind: str, level: str) -> Value:
        return self.code(self.fields[str(e.value)], self.done[id(e.args[0])])

    def code(self, f: Field, value: Value) -> Value:
        """What a packed field stores of a value; it is rounded down, so `floor` changes nothing."""
        if f.trits:
            raise NotLowered("trits")
        if value.op == "floor":
            (value,) = value.args
        return self.make("code", [value], "i32", "lane", f.bits)

    def op_field(self, e: Expr, kind: str, level: str) -> Value:
        f = self.fields[str(e.value)]
        if f.trits:
            raise NotLowered("trits")
        return self.make("unpack" if f.packed else "load", (), kind, level, f)

    def op_float32(self, e: Expr, kind: str, level: str) -> Value:
        value = self.done[id(e.args[0])]
        return value if kind == "f32" else self.make("float32", [value], kind, level)


def _whole(module: Module) -> None:
    """Raise NotLowered for what is not made of tiles alone."""
    if module.arrays or module.selections:
        raise NotLowered("selections, matrices and rounds")
    for f in (*module.fields, *module.states):
        if f.trits or f.shape not in ("n", "group", "scalar"):
            raise NotLowered(f"a field {f.storage}[{f.shape}]")
    if any(s.shape != "n" for s in module.states):
        raise NotLowered("a state per tensor")


def encode(program: Program, name: str, *, feed: bool, hop: bool = False) -> Kernel:
    """The kernel of an encode; `hop`: of what is there plus what a payload decodes to."""
    module = program.module
    _whole(module)
    kernel = Kernel(name, module, tile_of(module), states=list(module.states) if feed else [])
    values = _Values(module, kernel)
    if hop:
        values.incoming = _incoming(values)
    for one in program.passes:
        kernel.steps.append(_walk(values, program, one))
    for sink in program.scalars:
        kernel.steps.append(_stored(values, sink))
    return kernel


def _incoming(values: _Values) -> Value:
    """What the payload that is taken in decodes to: NaN where it tells of a NaN or infinity."""
    value = values.of(values.module.decode)
    if not values.module.status:
        return value
    told = values.make("told", (), "bool", "piece")
    nan = values.make("const", (), "f32", "piece", float("nan"))
    return values.make("where", [told, nan, value], "f32", "lane")


def _walk(values: _Values, program: Program, one: Pass) -> Walk:
    if program.guard(one) is not None:
        raise NotLowered("a walk that is not always wanted")
    found = Walk([_stored(values, s) for s in one.sinks])
    if values.module.group == 0:
        found.folds = [values.fold(e) for e in one.reductions]
    if one.status:
        size = values.make("magnitude_bits", [values.of(program.gradient)], "i32", "lane")
        found.folds.append(values.make("fold", [size], "i32", "tile", "max"))
        values.kernel.bad = values.make("total", [found.folds[-1]], "i32", "piece", "max")
    return found


def _stored(values: _Values, sink: Sink) -> Store:
    value = values.of(sink.expr)
    if sink.kind == "back":
        return Store("gradient", None, value, back=True)
    if sink.kind == "state":
        return Store("state", values.states[sink.name], value)
    f = sink.field
    assert f is not None
    if f.packed:
        value = values.code(f, value)
    elif f.storage in WHOLE:
        if value.kind not in ("i32", "i64"):
            raise NotLowered("whole numbers of floats")
    elif value.kind in ("i32", "bool", "i64"):
        value = values.make("convert", [value], "f32", value.level)
    return Store("payload", f, value)


def decode(module: Module, name: str, *, add: bool) -> Kernel:
    """The kernel of a decode."""
    _whole(module)
    kernel = Kernel(name, module, tile_of(module), adds=add)
    values = _Values(module, kernel)
    value = values.of(module.decode)
    if value.level != "lane":
        value = values.make("spread", [values.narrow(value, "lane")], "f32", "lane")
    if add:
        there = values.make("load", (), "f32", "lane", "g")
        value = values.make("add", [there, value], "f32", "lane")
    kernel.steps.append(Walk([Store("gradient", None, value)]))
    return kernel


def kernels(module: Module) -> dict[str, list[Kernel]]:
    """A spec's tile programs, by what is compiled together. Raises NotLowered, Unsupported.

    stateless: of a spec with states, the encode without them, which training never needs. hop:
    encodes that take a payload in, where one walk is enough: several would decode in each.
    """
    _whole(module)
    found: dict[str, list[Kernel]] = {"first": [], "stateless": [], "hop": []}
    for feed in (True, False):
        if (feed and not module.states) or (not feed and module.updates):
            continue
        program = schedule(module, feed=feed)
        name = "encode_feed" if feed else "encode"
        later = module.states and not feed
        found["stateless" if later else "first"].append(encode(program, name, feed=feed))
        if hops(module) and len(program.passes) == 1:
            found["hop"].append(encode(program, f"hop_{name}", feed=feed, hop=True))
    for add in (False, True):
        name = "decode_add" if add else "decode_set"
        found["first"].append(decode(module, name, add=add))
    return found
