"""LLVM IR of a tile program's instructions, for a number or for a vector of lanes.

One row per instruction. All are IEEE operations in the order that the language defines: no row has
fast-math flags, and none is fused with another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compll.backends.cpu.builder import (
    F32,
    F64,
    I1,
    I32,
    I64,
    KINDS,
    Builder,
    const,
    element,
    lanes,
)
from compll.backends.cpu.float_bits import (
    bfloat16_bits,
    bfloat16_up,
    bits,
    float8_bits,
    float16_bits,
    is_finite,
    key,
    magnitude_bits,
    of_bfloat16,
    of_float8,
    of_float16,
    unkey,
)  # fmt: skip
from compll.backends.cpu.transcendental import elementary
from compll.ir.tile import Value

WEYL = 0x9E3779B9


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
    """The row of min or max: the second argument if they do not compare."""
    return lambda b, x, y: b.select(compare(order)(b, x, y), x, y)


def arithmetic(of_floats: str, of_ints: str) -> Any:
    """The row of an operator that floats and integers have."""

    def row(b: Builder, x: Any, *rest: Any) -> Any:
        return getattr(b, of_floats if element(x) in (F32, F64) else of_ints)(x, *rest)

    return row


def _clamped(b: Builder, x: Any, least: float, most: float) -> Any:
    kind = element(x)
    low, high = const(kind, x, least), const(kind, x, most)
    return chosen("<")(b, chosen(">")(b, x, low), high)


def code(b: Builder, x: Any, most: int) -> Any:
    """0 to `most` as int32: truncated; NaN becomes 0."""
    if element(x) == I1:
        return b.zext(x, lanes(I32, x))
    near = _clamped(b, x, 0, most)
    return b.fptosi(near, lanes(I32, x)) if element(x) == F32 else near


def truncated(b: Builder, x: Any) -> Any:
    """An int32; 0 for infinity and NaN. A float64 must fit int64."""
    if element(x) == F64:
        return b.fptosi(x, lanes(I64, x))
    whole = b.fptosi(_clamped(b, x, -(2.0**31), 2.0**31 - 128), lanes(I32, x))
    return b.select(is_finite(b, x), whole, const(I32, x, 0))


def _absolute(b: Builder, x: Any) -> Any:
    if element(x) in (F32, F64):
        return b.intrinsic("fabs", x)
    return b.select(b.icmp_signed("<", x, const(element(x), x, 0)), b.neg(x), x)


def _floordiv(b: Builder, x: Any, y: Any) -> Any:
    if element(x) in (F32, F64):
        return b.intrinsic("floor", b.fdiv(x, y))
    # no processor traps at a divisor of 1, in place of 0 and -1
    zero, one = const(element(x), x, 0), const(element(x), x, 1)
    near_zero = b.icmp_unsigned("<", b.add(y, one), const(element(x), x, 2))
    safe = b.select(near_zero, one, y)
    rest = b.srem(x, safe)
    below = b.icmp_signed("<", b.xor(rest, safe), zero)
    below = b.and_(below, b.icmp_signed("!=", rest, zero))
    found = b.sub(b.sdiv(x, safe), b.zext(below, x.type))
    found = b.select(b.icmp_signed("==", y, const(element(x), x, -1)), b.neg(x), found)
    return b.select(b.icmp_signed("==", y, zero), zero, found)


def _shl(b: Builder, x: Any, y: Any) -> Any:
    kind = element(x)
    few = b.icmp_unsigned("<", y, const(kind, y, kind.width))
    left = b.shl(x, b.and_(y, const(kind, y, kind.width - 1)))
    return b.select(few, left, const(kind, x, 0))


def _shr(b: Builder, x: Any, y: Any) -> Any:
    kind = element(x)
    few = b.icmp_unsigned("<", y, const(kind, y, kind.width))
    return b.ashr(x, b.select(few, y, const(kind, y, kind.width - 1)))


def _exp2(b: Builder, x: Any) -> Any:
    if element(x) == I64:
        near = b.trunc(_clamped(b, x, -127, 128), lanes(I32, x))
        return b.fpext(_exp2(b, near), lanes(F64, x))
    exact = _clamped(b, x, -127, 128)
    biased = b.shl(b.add(exact, const(I32, x, 127)), const(I32, x, 23))
    return b.bitcast(biased, lanes(F32, x))


def _exponent(b: Builder, x: Any) -> Any:
    if element(x) == F64:
        return b.sext(_exponent(b, b.fptrunc(x, lanes(F32, x))), lanes(I64, x))
    field = b.and_(b.lshr(bits(b, x), const(I32, x, 23)), const(I32, x, 255))
    return b.sub(field, const(I32, x, 127))


def _float_bits(b: Builder, x: Any) -> Any:
    if element(x) == F64:
        return b.sext(_float_bits(b, b.fptrunc(x, lanes(F32, x))), lanes(I64, x))
    return bits(b, x)


def _from_float_bits(b: Builder, x: Any) -> Any:
    if element(x) == I64:
        return b.fpext(_from_float_bits(b, b.trunc(x, lanes(I32, x))), lanes(F64, x))
    return b.bitcast(x, lanes(F32, x))


def single(row: Any) -> Any:
    """The row of float32 for float64, too, which is rounded first."""

    def wide(b: Builder, x: Any) -> Any:
        if element(x) == F32:
            return row(b, x)
        return b.fpext(row(b, b.fptrunc(x, lanes(F32, x))), lanes(F64, x))

    return wide


def convert(b: Builder, x: Any, to: Any) -> Any:
    """A number as another kind."""
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
    """A number of elements, 0 to n; NaN is 0."""
    x, most = convert(b, x, F64), convert(b, n, F64)
    whole = b.fptosi(b.select(b.fcmp_ordered(">", x, const(F64, x, 0)), x, const(F64, x, 0)), I64)
    return b.select(b.fcmp_ordered(">=", x, most), n, whole)


def mixed(b: Builder, counter: Any, k1: Any) -> Any:
    """32 bits of a keyed counter; the upper ones are well mixed."""

    def shifted(x: Any, by: int) -> Any:
        return b.lshr(x, const(I32, x, by))

    x = b.mul(b.xor(counter, shifted(counter, 15)), const(I32, counter, 0x7FEB352D))
    return b.mul(b.xor(b.xor(x, shifted(x, 13)), k1), const(I32, counter, 0x846CA68B))


def hashed(b: Builder, counter: Any, k1: Any) -> Any:
    """A draw in [0, 1) of a keyed counter (see [Note: random draws] in numbers.py)."""
    x = mixed(b, counter, k1)
    # 23 bits as the fraction of a float in [1, 2), minus 1: cheaper than a conversion
    raw = b.or_(b.lshr(x, const(I32, x, 9)), const(I32, x, 0x3F800000))
    return b.fsub(b.bitcast(raw, lanes(F32, x)), const(F32, x, 1.0))


ROWS: dict[str, Callable[..., Any]] = {
    "add": arithmetic("fadd", "add"),
    "sub": arithmetic("fsub", "sub"),
    "mul": arithmetic("fmul", "mul"),
    "neg": arithmetic("fneg", "neg"),
    "div": lambda b, x, y: b.fdiv(x, y),
    "floordiv": _floordiv,
    "abs": _absolute,
    "floor": unary("floor"),
    "ceil": unary("ceil"),
    "round": unary("rint"),
    "sqrt": unary("sqrt"),
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
    "bitand": lambda b, x, y: b.and_(x, y),
    "bitor": lambda b, x, y: b.or_(x, y),
    "bitxor": lambda b, x, y: b.xor(x, y),
    "shl": _shl,
    "shr": _shr,
    "trunc": truncated,
    "trit": lambda b, x: code(b, x, 2),
    "exponent": _exponent,
    "exp2": _exp2,
    "float_bits": _float_bits,
    "from_float_bits": _from_float_bits,
    "float16": single(lambda b, x: of_float16(b, float16_bits(b, x))),
    "bfloat16": single(lambda b, x: of_bfloat16(b, bfloat16_bits(b, x))),
    "bfloat16_up": single(bfloat16_up),
    "float8_e4m3": single(lambda b, x: of_float8(b, float8_bits(b, x))),
    "float32": single(lambda b, x: x),
    "magnitude_bits": magnitude_bits,
    "repeat": lambda b, x: x,
    "order_key": key,
    "from_key": unkey,
    "as_count": _as_count,
}
ROWS |= {name: elementary(name, ROWS) for name in ("exp", "log", "log2")}
ROWS["pow"] = elementary("power", ROWS)


def apply(b: Builder, v: Value, args: list[Any]) -> Any:
    """An instruction, by its row. Loops handle those that depend on the lane themselves."""
    if v.op == "convert":
        return convert(b, args[0], KINDS[v.kind])
    if v.op == "code":
        return code(b, args[0], (1 << v.attr) - 1)
    return ROWS[v.op](b, *args)
