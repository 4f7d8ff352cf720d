"""What a tile program's instructions become in LLVM IR: of a number, or of a vector of lanes.

One row per instruction. All are IEEE operations in the order that the language defines: no row has
fast-math flags, and none is fused with another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from compll.numerics.elementary import functions

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, F32, F64, PTR, VOID = (
    ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.PointerType(), ir.VoidType(),
)  # fmt: skip
KINDS = {"f32": F32, "i32": I32, "bool": I1, "f64": F64, "i64": I64}
#: whether this processor lacks conversions of float16, for which LLVM would call a library
SOFT_HALVES = llvm.get_host_cpu_features().get("f16c") is False
MAGNITUDE, INFINITE = 0x7FFFFFFF, 0x7F800000
WEYL = 0x9E3779B9


def lanes(kind: Any, like: Any) -> Any:
    """The type with elements of `kind` that has as many lanes as the value `like`."""
    return ir.VectorType(kind, like.type.count) if isinstance(like.type, ir.VectorType) else kind


def const(kind: Any, like: Any, number: float) -> Any:
    """The number in every lane."""
    made = lanes(kind, like)
    return ir.Constant(made, [number] * made.count if made is not kind else number)


def element(x: Any) -> Any:
    """The type of one lane."""
    return x.type.element if isinstance(x.type, ir.VectorType) else x.type


class Builder(ir.IRBuilder):  # type: ignore[misc]
    """LLVM's builder, with the few things that IR text needs and it has no words for."""

    def intrinsic(self, name: str, *args: Any) -> Any:
        """A call of an intrinsic that is overloaded by its first argument's type."""
        kind = args[0].type
        letters = {HALF: "f16", F32: "f32", F64: "f64", I32: "i32", I64: "i64"}
        inner = letters[element(args[0])]
        suffix = f"v{kind.count}{inner}" if isinstance(kind, ir.VectorType) else inner
        full = f"llvm.{name}.{suffix}"
        result = element(args[0]) if name.startswith("vector.reduce") else kind
        known = self.module.globals.get(full)
        if known is None:
            signature = ir.FunctionType(result, [a.type for a in args])
            known = ir.Function(self.module, signature, full)
        return self.call(known, args)

    def room(self, kind: Any, count: int = 1) -> Any:
        """Memory of the function, for values of a kind."""
        with self.goto_entry_block():
            found = self.alloca(ir.ArrayType(kind, count))
        found.align, found.type = 64, PTR
        return found

    def splat(self, x: Any, count: int) -> Any:
        """A number in `count` lanes."""
        kind = ir.VectorType(x.type, count)
        empty = ir.Constant(kind, ir.Undefined)
        first = self.insert_element(empty, x, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, count), [0] * count)
        return self.shuffle_vector(first, empty, zeros)


class _Number:
    """A float64 value with Python's operators, for `numerics.elementary`."""

    def __init__(self, b: Builder, x: Any) -> None:
        self.b, self.x = b, x

    def of(self, other: Any) -> Any:
        """Another number's LLVM value."""
        return other.x if isinstance(other, _Number) else const(F64, self.x, float(other))

    def __add__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fadd(self.x, self.of(o)))

    def __sub__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fsub(self.x, self.of(o)))

    def __mul__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fmul(self.x, self.of(o)))

    def __truediv__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fdiv(self.x, self.of(o)))

    def __rmul__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fmul(self.x, self.of(o)))

    def __neg__(self) -> _Number:
        return _Number(self.b, self.b.fneg(self.x))

    def __lt__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fcmp_ordered("<", self.x, self.of(o)))

    def __gt__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fcmp_ordered(">", self.x, self.of(o)))

    def __eq__(self, o: object) -> _Number:  # type: ignore[override]
        return _Number(self.b, self.b.fcmp_ordered("==", self.x, self.of(o)))

    def __ne__(self, o: object) -> _Number:  # type: ignore[override]
        return _Number(self.b, self.b.fcmp_unordered("!=", self.x, self.of(o)))

    def __and__(self, o: _Number) -> _Number:
        return _Number(self.b, self.b.and_(self.x, o.x))

    def __or__(self, o: _Number) -> _Number:
        return _Number(self.b, self.b.or_(self.x, o.x))

    __hash__ = None  # type: ignore[assignment]


def _elementary(b: Builder) -> Any:
    """exp, log, log2 and power, made of this builder's instructions."""

    def call(name: str) -> Callable[[_Number], _Number]:
        return lambda v: _Number(b, b.intrinsic(name, v.x))

    def where(c: _Number, a: Any, o: Any) -> _Number:
        first, second = (
            v.x if isinstance(v, _Number) else const(F64, c.x, float(v)) for v in (a, o)
        )
        return _Number(b, b.select(c.x, first, second))

    def power_of_two(k: _Number) -> _Number:
        biased = b.add(b.fptosi(k.x, lanes(I64, k.x)), const(I64, k.x, 1023))
        return _Number(b, b.bitcast(b.shl(biased, const(I64, k.x, 52)), k.x.type))

    def split(v: _Number) -> tuple[_Number, _Number]:
        tiny = call("fabs")(v) < 2.2250738585072014e-308
        bits = b.bitcast(where(tiny, v * 18014398509481984.0, v).x, lanes(I64, v.x))
        kept = b.and_(bits, const(I64, v.x, (1 << 52) - 1))
        mantissa = b.bitcast(b.or_(kept, const(I64, v.x, 1022 << 52)), v.x.type)
        biased = b.and_(b.lshr(bits, const(I64, v.x, 52)), const(I64, v.x, 2047))
        exponent = b.sitofp(b.sub(biased, const(I64, v.x, 1022)), v.x.type)
        return _Number(b, mantissa), _Number(b, exponent) - where(tiny, 54.0, 0.0)

    return functions(where, split, power_of_two, call("rint"), call("floor"), call("fabs"))


def elementary(name: str) -> Any:
    """The row of one of these functions: float64, of a float32 rounded at the end."""

    def row(b: Builder, *args: Any) -> Any:
        single = element(args[0]) == F32
        wide = [b.fpext(x, lanes(F64, x)) if single else x for x in args]
        found = getattr(_elementary(b), name)(*(_Number(b, x) for x in wide)).x
        return b.fptrunc(found, lanes(F32, found)) if single else found

    return row


def unary(name: str) -> Any:
    """The row of an LLVM intrinsic."""
    return lambda b, x: b.intrinsic(name, x)


def compare(order: str) -> Any:
    """The row of a comparison."""

    def row(b: Builder, x: Any, y: Any) -> Any:
        if element(x) in (F32, F64):
            return (b.fcmp_unordered if order == "!=" else b.fcmp_ordered)(order, x, y)
        return (b.icmp_unsigned if element(x) == I1 else b.icmp_signed)(order, x, y)

    return row


def chosen(order: str) -> Any:
    """min or max: the second where they cannot be compared."""
    return lambda b, x, y: b.select(compare(order)(b, x, y), x, y)


def arithmetic(of_floats: str, of_ints: str) -> Any:
    """The row of an operator that both have."""

    def row(b: Builder, x: Any, *rest: Any) -> Any:
        return getattr(b, of_floats if element(x) in (F32, F64) else of_ints)(x, *rest)

    return row


def bits(b: Builder, x: Any) -> Any:
    """A float32's bits."""
    return b.bitcast(x, lanes(I32, x))


def magnitude_bits(b: Builder, x: Any) -> Any:
    """A float32's bits without the sign: they order as magnitudes do."""
    return b.and_(bits(b, x), const(I32, x, MAGNITUDE))


def key(b: Builder, x: Any) -> Any:
    """int32 that orders as the floats do (see order_key in numbers.py)."""
    raw = bits(b, x) if element(x) == F32 else x
    return b.xor(raw, b.and_(b.ashr(raw, const(I32, x, 31)), const(I32, x, MAGNITUDE)))


def unkey(b: Builder, x: Any) -> Any:
    """Inverse of key."""
    return b.bitcast(key(b, x), lanes(F32, x))


def is_finite(b: Builder, x: Any) -> Any:
    """Whether a float is neither infinite nor NaN."""
    if element(x) == F64:
        size = b.intrinsic("fabs", x)
        return b.fcmp_ordered("<", size, const(F64, x, float("inf")))
    return b.icmp_signed("<", magnitude_bits(b, x), const(I32, x, INFINITE))


def _clamped(b: Builder, x: Any, least: float, most: float) -> Any:
    kind = element(x)
    low, high = const(kind, x, least), const(kind, x, most)
    return chosen("<")(b, chosen(">")(b, x, low), high)


def code(b: Builder, x: Any, most: int) -> Any:
    """0..most as int32: truncated; NaN becomes 0."""
    if element(x) == I1:
        return b.zext(x, lanes(I32, x))
    near = _clamped(b, x, 0, most)
    return b.fptosi(near, lanes(I32, x)) if element(x) == F32 else near


def truncated(b: Builder, x: Any) -> Any:
    """As int32; 0 for infinity and NaN."""
    whole = b.fptosi(_clamped(b, x, -(2.0**31), 2.0**31 - 128), lanes(I32, x))
    return b.select(is_finite(b, x), whole, const(I32, x, 0))


def _absolute(b: Builder, x: Any) -> Any:
    if element(x) in (F32, F64):
        return b.intrinsic("fabs", x)
    return b.select(b.icmp_signed("<", x, const(element(x), x, 0)), b.neg(x), x)


def _sign(b: Builder, x: Any) -> Any:
    kind = element(x)
    zero, one, less = (const(kind, x, v) for v in (0, 1, -1))
    return b.select(compare("<")(b, x, zero), less, one)


def _floordiv(b: Builder, x: Any, y: Any) -> Any:
    if element(x) in (F32, F64):
        return b.intrinsic("floor", b.fdiv(x, y))
    safe, _, below = _parted(b, x, y)
    zero = const(element(x), x, 0)
    found = b.sub(b.sdiv(x, safe), b.zext(below, x.type))
    found = b.select(b.icmp_signed("==", y, const(element(x), x, -1)), b.neg(x), found)
    return b.select(b.icmp_signed("==", y, zero), zero, found)


def _mod(b: Builder, x: Any, y: Any) -> Any:
    if element(x) in (F32, F64):
        return b.fsub(x, b.fmul(y, _floordiv(b, x, y)))
    safe, rest, below = _parted(b, x, y)
    return b.select(below, b.add(rest, safe), rest)


def _parted(b: Builder, x: Any, y: Any) -> tuple[Any, Any, Any]:
    """A divisor that no processor traps at, the rest, and whether that is on the other side of 0.

    By 0 and -1 the rest is 0, as it is by 1.
    """
    near_zero = b.icmp_unsigned("<", b.add(y, const(element(x), x, 1)), const(element(x), x, 2))
    safe = b.select(near_zero, const(element(x), x, 1), y)
    rest = b.srem(x, safe)
    zero = const(element(x), x, 0)
    other = b.icmp_signed("<", b.xor(rest, safe), zero)
    return safe, rest, b.and_(other, b.icmp_signed("!=", rest, zero))


def _shl(b: Builder, x: Any, y: Any) -> Any:
    few = b.icmp_unsigned("<", y, const(I32, y, 32))
    left = b.shl(x, b.and_(y, const(I32, y, 31)))
    return b.select(few, left, const(I32, x, 0))


def _shr(b: Builder, x: Any, y: Any) -> Any:
    few = b.icmp_unsigned("<", y, const(I32, y, 32))
    return b.ashr(x, b.select(few, y, const(I32, y, 31)))


def _exp2(b: Builder, x: Any) -> Any:
    exact = _clamped(b, x, -127, 128)
    biased = b.shl(b.add(exact, const(I32, x, 127)), const(I32, x, 23))
    return b.bitcast(biased, lanes(F32, x))


def _exponent(b: Builder, x: Any) -> Any:
    field = b.and_(b.lshr(bits(b, x), const(I32, x, 23)), const(I32, x, 255))
    return b.sub(field, const(I32, x, 127))


def bfloat16_bits(b: Builder, x: Any) -> Any:
    """bfloat16 bits as int32, nearest even; NaN stays NaN."""
    raw = bits(b, x)
    odd = b.and_(b.lshr(raw, const(I32, x, 16)), const(I32, x, 1))
    near = b.add(b.add(raw, const(I32, x, 0x7FFF)), odd)
    quiet = b.or_(raw, const(I32, x, 0x400000))
    return b.lshr(b.select(b.fcmp_unordered("uno", x, x), quiet, near), const(I32, x, 16))


def of_bfloat16(b: Builder, x: Any) -> Any:
    """float32 of bfloat16 bits as int32."""
    return b.bitcast(b.shl(x, const(I32, x, 16)), lanes(F32, x))


def _bfloat16_up(b: Builder, x: Any) -> Any:
    raw = bits(b, x)
    up = b.and_(b.add(raw, const(I32, x, 0xFFFF)), const(I32, x, -65536))
    return b.bitcast(b.select(is_finite(b, x), up, raw), lanes(F32, x))


def float16_bits(b: Builder, x: Any) -> Any:
    """float16 bits as int32, nearest even."""
    if not SOFT_HALVES:
        found = b.bitcast(b.fptrunc(x, lanes(HALF, x)), lanes(I16, x))
        return b.zext(found, lanes(I32, x))
    raw, size = bits(b, x), magnitude_bits(b, x)

    def c(value: int) -> Any:
        return const(I32, x, value)

    odd = b.and_(b.lshr(size, c(13)), c(1))
    normal = b.lshr(b.add(b.add(size, c(0xFFF - 0x38000000)), odd), c(13))
    # the unit of a float in [.5, 1) is that of the numbers below 2**-14
    near_zero = b.fadd(b.bitcast(size, x.type), const(F32, x, 0.5))
    tiny = b.sub(bits(b, near_zero), c(0x3F000000))
    found = b.select(b.icmp_signed("<", size, c(0x38800000)), tiny, normal)
    found = b.select(b.icmp_signed(">=", size, c(0x477FF000)), c(0x7C00), found)
    nan = b.or_(c(0x7E00), b.and_(b.lshr(size, c(13)), c(0x3FF)))
    found = b.select(b.icmp_signed(">", size, c(INFINITE)), nan, found)
    return b.or_(found, b.and_(b.lshr(raw, c(16)), c(0x8000)))


def of_float16(b: Builder, x: Any) -> Any:
    """float32 of float16 bits as int32."""
    single_lanes = lanes(F32, x)
    if not SOFT_HALVES:
        return b.fpext(b.bitcast(b.trunc(x, lanes(I16, x)), lanes(HALF, x)), single_lanes)

    def c(value: int) -> Any:
        return const(I32, x, value)

    size = b.and_(x, c(0x7FFF))
    normal = b.add(b.shl(size, c(13)), c(0x38000000))
    large = b.add(normal, c(0x38000000))
    large = b.select(b.icmp_signed(">", size, c(0x7C00)), b.or_(large, c(0x400000)), large)
    tiny = b.bitcast(b.fmul(b.sitofp(size, single_lanes), const(F32, x, 2.0**-24)), x.type)
    found = b.select(b.icmp_signed("<", size, c(0x400)), tiny, normal)
    found = b.select(b.icmp_signed(">=", size, c(0x7C00)), large, found)
    return b.bitcast(b.or_(found, b.shl(b.and_(x, c(0x8000)), c(16))), single_lanes)


def single(row: Any) -> Any:
    """A row of float32 for float64, too, which is rounded first."""

    def wide(b: Builder, x: Any) -> Any:
        if element(x) == F32:
            return row(b, x)
        return b.fpext(row(b, b.fptrunc(x, lanes(F32, x))), lanes(F64, x))

    return wide


def convert(b: Builder, x: Any, to: Any) -> Any:
    """A number as one of another kind."""
    kind, target = element(x), lanes(to, x)
    if kind == to:
        return x
    if to in (F32, F64):
        if kind in (F32, F64):
            return b.fptrunc(x, target) if to == F32 else b.fpext(x, target)
        return b.uitofp(x, target) if kind == I1 else b.sitofp(x, target)
    if kind == I1:
        return b.zext(x, target)
    if kind in (F32, F64):
        return b.fptosi(x, target)
    return b.trunc(x, target) if kind.width > to.width else b.sext(x, target)


def _as_count(b: Builder, x: Any, n: Any) -> Any:
    """A number of elements, 0..n; NaN is 0."""
    x, most = convert(b, x, F64), convert(b, n, F64)
    whole = b.fptosi(b.select(b.fcmp_ordered(">", x, const(F64, x, 0)), x, const(F64, x, 0)), I64)
    return b.select(b.fcmp_ordered(">=", x, most), n, whole)


def hashed(b: Builder, counter: Any, k1: Any) -> Any:
    """A draw in [0, 1) of a keyed counter (see [Note: random draws] in numbers.py)."""

    def shifted(x: Any, by: int) -> Any:
        return b.lshr(x, const(I32, x, by))

    x = b.mul(b.xor(counter, shifted(counter, 15)), const(I32, counter, 0x7FEB352D))
    x = b.mul(b.xor(b.xor(x, shifted(x, 13)), k1), const(I32, counter, 0x846CA68B))
    # 23 bits as the fraction of a float in [1, 2), minus 1: cheaper than a conversion
    raw = b.bitcast(b.or_(shifted(x, 9), const(I32, x, 0x3F800000)), lanes(F32, x))
    return b.fsub(raw, const(F32, x, 1.0))


ROWS: dict[str, Callable[..., Any]] = {
    "add": arithmetic("fadd", "add"),
    "sub": arithmetic("fsub", "sub"),
    "mul": arithmetic("fmul", "mul"),
    "neg": arithmetic("fneg", "neg"),
    "div": lambda b, x, y: b.fdiv(x, y),
    "floordiv": _floordiv,
    "mod": _mod,
    "abs": _absolute,
    "sign": _sign,
    "floor": unary("floor"),
    "ceil": unary("ceil"),
    "round": unary("rint"),
    "sqrt": unary("sqrt"),
    "exp": elementary("exp"),
    "log": elementary("log"),
    "log2": elementary("log2"),
    "pow": elementary("power"),
    "min": chosen("<"),
    "max": chosen(">"),
    "where": lambda b, c, x, y: b.select(c, x, y),
    "lt": compare("<"),
    "le": compare("<="),
    "gt": compare(">"),
    "ge": compare(">="),
    "eq": compare("=="),
    "ne": compare("!="),
    "and": lambda b, x, y: b.and_(x, y),
    "or": lambda b, x, y: b.or_(x, y),
    "not": lambda b, x: b.xor(x, const(I1, x, 1)),
    "isfinite": is_finite,
    "isnan": lambda b, x: b.fcmp_unordered("uno", x, x),
    "bitand": lambda b, x, y: b.and_(x, y),
    "bitor": lambda b, x, y: b.or_(x, y),
    "bitxor": lambda b, x, y: b.xor(x, y),
    "shl": _shl,
    "shr": _shr,
    "trunc": truncated,
    "exponent": _exponent,
    "exp2": _exp2,
    "float16": single(lambda b, x: of_float16(b, float16_bits(b, x))),
    "bfloat16": single(lambda b, x: of_bfloat16(b, bfloat16_bits(b, x))),
    "bfloat16_up": single(_bfloat16_up),
    "float32": single(lambda b, x: x),
    "magnitude_bits": magnitude_bits,
    "spread": lambda b, x: x,
    "order_key": key,
    "as_count": _as_count,
    "outside": lambda b, x, n: b.icmp_unsigned(">=", b.zext(x, lanes(I64, x)), n),
}
