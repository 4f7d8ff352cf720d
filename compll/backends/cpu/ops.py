"""Typed primitives for the generated CPU kernels.

Numba widens small integers to 64 bits and cannot reinterpret bits, which costs vector width, so
each primitive states its LLVM instructions itself. All are elementwise and inline; what reads and
writes arrays is in cpu/memory.py.

[Note: masked stores] LLVM makes `x[i] = value if good else x[i]` a store under a mask. AMD's
processors without AVX-512 take 12 cycles and more for one (vmaskmovps): onebit_group encoded with
feedback at a third of its speed. So there `kept` blends bits, by a mask that LLVM cannot tell from
any other number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I8, I16, I32, F32, HALF = (*map(ir.IntType, (8, 16, 32)), ir.FloatType(), ir.HalfType())
f32, i32, u32, u8, b1, i64 = (
    types.float32,
    types.int32,
    types.uint32,
    types.uint8,
    types.boolean,
    types.int64,
)

Emit = Callable[[Any, Any, Any], Any]


def _primitive(result: Any, args: tuple[Any, ...], emit: Emit) -> Any:
    """An intrinsic with a fixed signature; emit(context, builder, values) builds it."""
    names = ", ".join(f"a{i}" for i in range(len(args)))

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return emit((context, signature), builder, values)

    # Numba reads the number of arguments from the function itself.
    scope: dict[str, Any] = {"signature": result(*args), "generate": generate}
    exec(f"def declare(typing, {names}):\n    return signature, generate", scope)
    return intrinsic(scope["declare"])


def _llvm(name: str) -> Emit:
    def emit(context: Any, b: Any, v: Any) -> Any:
        return b.call(b.module.declare_intrinsic(f"llvm.{name}", [F32]), v)

    return emit


def _c(value: int) -> Any:
    return ir.Constant(I32, value)


def _binary(method: str) -> Any:
    return _primitive(i32, (i32, i32), lambda c, b, v: getattr(b, method)(v[0], v[1]))


def _select(kind: Any) -> Any:
    return _primitive(kind, (b1, kind, kind), lambda c, b, v: b.select(v[0], v[1], v[2]))


def _ordered_first(kind: Any, order: str) -> Any:
    return _primitive(kind, (kind, kind), lambda c, b, v: b.select(b.fcmp_ordered(order, *v), *v))


f_abs, f_floor, f_ceil, f_round, f_sqrt = (
    _primitive(f32, (f32,), _llvm(n)) for n in ("fabs", "floor", "ceil", "rint", "sqrt")
)
#: the second where they cannot be compared
f_min, d_min = _ordered_first(f32, "<"), _ordered_first(types.float64, "<")
f_max, d_max = _ordered_first(f32, ">"), _ordered_first(types.float64, ">")
f_where, i_where, b_where = _select(f32), _select(i32), _select(b1)
d_where = _select(types.float64)
b_and = _primitive(b1, (b1, b1), lambda c, b, v: b.and_(*v))
b_or = _primitive(b1, (b1, b1), lambda c, b, v: b.or_(*v))
b_not = _primitive(b1, (b1,), lambda c, b, v: b.xor(v[0], ir.Constant(ir.IntType(1), 1)))
i_add, i_sub, i_mul = _binary("add"), _binary("sub"), _binary("mul")
i_and, i_or, i_xor = _binary("and_"), _binary("or_"), _binary("xor")


def _shl(c: Any, b: Any, v: Any) -> Any:
    """Nothing is left where more bits are asked for than there are, or a number below 0."""
    few = b.icmp_unsigned("<", v[1], _c(32))
    return b.select(few, b.shl(v[0], b.and_(v[1], _c(31))), _c(0))


def _shr(c: Any, b: Any, v: Any) -> Any:
    """Only the sign is left there."""
    return b.ashr(v[0], b.select(b.icmp_unsigned("<", v[1], _c(32)), v[1], _c(31)))


i_shl, i_shr = _primitive(i32, (i32, i32), _shl), _primitive(i32, (i32, i32), _shr)
i_neg = _primitive(i32, (i32,), lambda c, b, v: b.neg(v[0]))
i_max = _primitive(i32, (i32, i32), lambda c, b, v: b.select(b.icmp_signed(">", *v), *v))
i_min = _primitive(i32, (i32, i32), lambda c, b, v: b.select(b.icmp_signed("<", *v), *v))
i_abs = _primitive(
    i32, (i32,), lambda c, b, v: b.select(b.icmp_signed("<", v[0], _c(0)), b.neg(v[0]), v[0])
)
f_of_i = _primitive(f32, (i32,), lambda c, b, v: b.sitofp(v[0], F32))
f_of_b = _primitive(f32, (b1,), lambda c, b, v: b.uitofp(v[0], F32))
i_of_b = _primitive(i32, (b1,), lambda c, b, v: b.zext(v[0], I32))
i_of_u = _primitive(i32, (u8,), lambda c, b, v: b.zext(v[0], I32))


def _clamped(b: Any, x: Any, least: float, most: float) -> Any:
    low, high = ir.Constant(F32, least), ir.Constant(F32, most)
    x = b.select(b.fcmp_ordered(">", x, low), x, low)
    return b.select(b.fcmp_ordered("<", x, high), x, high)


def _code(most: int) -> Any:
    """float to 0..most: truncated; NaN becomes 0."""
    return _primitive(
        u8, (f32,), lambda c, b, v: b.trunc(b.fptosi(_clamped(b, v[0], 0.0, most), I32), I8)
    )


trit = _primitive(i32, (f32,), lambda c, b, v: b.fptosi(_clamped(b, v[0], 0.0, 2.0), I32))
code1, code2, code4, code8 = _code(1), _code(3), _code(15), _code(255)


def _i_code(most: int) -> Any:
    def emit(c: Any, b: Any, v: Any) -> Any:
        x = b.select(b.icmp_signed(">", v[0], _c(0)), v[0], _c(0))
        return b.trunc(b.select(b.icmp_signed("<", x, _c(most)), x, _c(most)), I8)

    return _primitive(u8, (i32,), emit)


i_code1, i_code2, i_code4, i_code8 = _i_code(1), _i_code(3), _i_code(15), _i_code(255)
b_code = _primitive(u8, (b1,), lambda c, b, v: b.zext(v[0], I8))


def _trunc(c: Any, b: Any, v: Any) -> Any:
    finite = b.fcmp_ordered(
        "<",
        b.call(b.module.declare_intrinsic("llvm.fabs", [F32]), v),
        ir.Constant(F32, float("inf")),
    )
    clamped = b.fptosi(_clamped(b, v[0], -(2.0**31), 2.0**31 - 128), I32)
    return b.select(finite, clamped, _c(0))


i_trunc = _primitive(i32, (f32,), _trunc)
bits = _primitive(i32, (f32,), lambda c, b, v: b.bitcast(v[0], I32))
unbits = _primitive(f32, (i32,), lambda c, b, v: b.bitcast(v[0], F32))
abs_bits = _primitive(i32, (f32,), lambda c, b, v: b.and_(b.bitcast(v[0], I32), _c(0x7FFFFFFF)))


def _exp2(c: Any, b: Any, v: Any) -> Any:
    low = b.select(b.icmp_signed(">", v[0], _c(-127)), v[0], _c(-127))
    exact = b.select(b.icmp_signed("<", low, _c(128)), low, _c(128))
    return b.bitcast(b.shl(b.add(exact, _c(127)), _c(23)), F32)


#: the exponent in a float's bits, and the float with that exponent (see numbers.py)
exponent = _primitive(
    i32,
    (f32,),
    lambda c, b, v: b.sub(b.and_(b.lshr(b.bitcast(v[0], I32), _c(23)), _c(255)), _c(127)),
)
power_of_two = _primitive(f32, (i32,), _exp2)


def _ordered(b: Any, x: Any) -> Any:
    return b.xor(x, b.and_(b.ashr(x, _c(31)), _c(0x7FFFFFFF)))


key = _primitive(i32, (f32,), lambda c, b, v: _ordered(b, b.bitcast(v[0], I32)))
unkey = _primitive(f32, (i32,), lambda c, b, v: b.bitcast(_ordered(b, v[0]), F32))
finite = _primitive(
    b1,
    (f32,),
    lambda c, b, v: b.icmp_signed(
        "<", b.and_(b.bitcast(v[0], I32), _c(0x7FFFFFFF)), _c(0x7F800000)
    ),
)


def _hidden(b: Any, value: int) -> Any:
    """A number that LLVM's optimizer does not know."""
    made = b.asm(ir.FunctionType(I32, [I32]), "", "=r,0", [_c(value)], False)
    made.attributes.add("readnone")
    made.attributes.add("nounwind")
    return made


def masked_stores_cost() -> bool:
    """Whether the processor has AVX without AVX-512; see [Note: masked stores]."""
    has = llvm.get_host_cpu_features()
    return has.get("avx", False) and not has.get("avx512vl", False)


MASKED_STORES_COST = masked_stores_cost()


def where_finite(b: Any, value: Any, before: Any) -> Any:
    """The value if it is finite, else what was before; see [Note: masked stores]."""
    new, old = b.bitcast(value, I32), b.bitcast(before, I32)
    size, least = b.and_(new, _c(0x7FFFFFFF)), _c(0x7F800000)
    if not MASKED_STORES_COST:
        return b.select(b.icmp_signed("<", size, least), value, before)
    mask = b.ashr(b.sub(size, least), _hidden(b, 31))
    return b.bitcast(b.xor(old, b.and_(b.xor(old, new), mask)), F32)


#: the value if it is finite, else what was before
kept = _primitive(f32, (f32, f32), lambda c, b, v: where_finite(b, *v))
is_nan = _primitive(b1, (f32,), lambda c, b, v: b.fcmp_unordered("uno", v[0], v[0]))


def _bf16_bits(b: Any, x: Any) -> Any:
    raw = b.bitcast(x, I32)
    odd = b.and_(b.lshr(raw, _c(16)), _c(1))
    near = b.add(b.add(raw, _c(0x7FFF)), odd)
    quiet = b.or_(raw, _c(0x400000))
    return b.lshr(b.select(b.fcmp_unordered("uno", x, x), quiet, near), _c(16))


bfloat16 = _primitive(
    f32, (f32,), lambda c, b, v: b.bitcast(b.shl(_bf16_bits(b, v[0]), _c(16)), F32)
)
float16 = _primitive(f32, (f32,), lambda c, b, v: b.fpext(b.fptrunc(v[0], HALF), F32))


def _bf16_up(c: Any, b: Any, v: Any) -> Any:
    raw = b.bitcast(v[0], I32)
    up = b.and_(b.add(raw, _c(0xFFFF)), _c(-65536))
    usual = b.icmp_signed("<", b.and_(raw, _c(0x7FFFFFFF)), _c(0x7F800000))
    return b.bitcast(b.select(usual, up, raw), F32)


bfloat16_up = _primitive(f32, (f32,), _bf16_up)


WEYL = 0x9E3779B9


def _hash(b: Any, counter: Any, k1: Any, drop: int) -> Any:
    x = b.mul(b.xor(counter, b.lshr(counter, _c(15))), _c(0x7FEB352D))
    x = b.xor(b.xor(x, b.lshr(x, _c(13))), k1)
    return b.lshr(b.mul(x, _c(0x846CA68B)), _c(drop))


def _uniform(c: Any, b: Any, v: Any) -> Any:
    # 23 bits as the fraction of a float in [1, 2), minus 1: cheaper than a conversion.
    fraction = b.or_(_hash(b, b.add(v[0], v[1]), v[2], 9), _c(0x3F800000))
    return b.fsub(b.bitcast(fraction, F32), ir.Constant(F32, 1.0))


#: weyl(i): a counter spread over 32 bits; counter(e, k0): that of a tile's first element, keyed
weyl = _primitive(u32, (u32,), lambda c, b, v: b.mul(v[0], _c(WEYL)))
counter = _primitive(u32, (u32, u32), lambda c, b, v: b.add(b.mul(v[0], _c(WEYL)), v[1]))
#: uniform(weyl(i), counter(e, k0), k1): the draw of element e + i (see [Note: random draws])
uniform = _primitive(f32, (u32, u32, u32), _uniform)
#: the hash that chooses sample positions
scramble = _primitive(
    u32, (u32, u32), lambda c, b, v: _hash(b, b.add(b.mul(v[0], _c(WEYL)), v[1]), _c(0), 8)
)
pack2 = _primitive(u8, (u8, u8), lambda c, b, v: _packed(b, v, 4))
pack4 = _primitive(u8, (u8,) * 4, lambda c, b, v: _packed(b, v, 2))
pack8 = _primitive(u8, (u8,) * 8, lambda c, b, v: _packed(b, v, 1))


def _packed(b: Any, values: Any, width: int) -> Any:
    total = values[0]
    for plane, value in enumerate(values[1:], 1):
        total = b.or_(total, b.shl(value, ir.Constant(I8, plane * width)))
    return total


def _plane(width: int) -> Any:
    """plane(byte, shift): the code of one plane."""
    mask = ir.Constant(I8, (1 << width) - 1)
    return _primitive(u8, (u8, u8), lambda c, b, v: b.and_(b.lshr(v[0], v[1]), mask))


plane1, plane2, plane4 = _plane(1), _plane(2), _plane(4)
#: how many zero bits come before the first one, from the lowest on (64 when there is none)
zeros_below = _primitive(
    i64, (types.uint64,), lambda c, b, v: b.cttz(v[0], ir.Constant(ir.IntType(1), 0))
)
