"""LLVM IR of a tile program's instructions, for a number or for a vector of lanes.

ROWS has each of LLVM's; those of bits.py are traced. All are IEEE operations in the order that the
language defines: no row has fast-math flags, and none is fused with another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import Builder, Routine, routine
from compll.backends.cpu.processor import FEATURES
from compll.backends.cpu.types import (
    F32,
    F64,
    HALF,
    I1,
    I16,
    I32,
    I64,
    KINDS,
    const,
    element,
    lanes,
)
from compll.ir.tile import Value
from compll.numerics import bits, draws
from compll.numerics.traced import Number

#: emits an instruction: of a builder and values
Row = Callable[..., ir.Value]
#: true if this processor has no conversions of float16; LLVM would call a library for them
SOFT_HALVES = FEATURES.get("f16c") is False


def unary(name: str) -> Row:
    """The row of an LLVM intrinsic."""
    return lambda b, x: b.intrinsic(name, x)


def compare(order: str) -> Row:
    """The row of a comparison."""

    def row(b: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
        if element(x) in (F32, F64):
            return (b.fcmp_unordered if order == "!=" else b.fcmp_ordered)(order, x, y)
        return (b.icmp_unsigned if element(x) == I1 else b.icmp_signed)(order, x, y)

    return row


def arithmetic(of_floats: str, of_ints: str) -> Row:
    """The row of an operator that floats and integers have."""

    def row(b: Builder, x: ir.Value, *rest: ir.Value) -> ir.Value:
        return getattr(b, of_floats if element(x) in (F32, F64) else of_ints)(x, *rest)

    return row


def convert(b: Builder, x: ir.Value, to: ir.Type) -> ir.Value:
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


def _bits(b: Builder, x: ir.Value) -> ir.Value:
    """The bits of a float as an integer, or the float of an integer's bits."""
    other = {F32: I32, F64: I64, I32: F32, I64: F64}[element(x)]
    return b.bitcast(x, lanes(other, x))


#: operators that take many instructions
LONG = ("exp", "log", "log2", "pow")
#: instructions of LLVM, by the names of the language and of traced.py
ROWS: dict[str, Row] = {
    "add": arithmetic("fadd", "add"),
    "sub": arithmetic("fsub", "sub"),
    "mul": arithmetic("fmul", "mul"),
    "neg": arithmetic("fneg", "neg"),
    "div": Builder.fdiv,
    "floor": unary("floor"),
    "ceil": unary("ceil"),
    "round": unary("rint"),
    "sqrt": unary("sqrt"),
    "magnitude": unary("fabs"),
    "where": Builder.select,
    "lt": compare("<"),
    "le": compare("<="),
    "gt": compare(">"),
    "ge": compare(">="),
    "eq": compare("=="),
    "ne": compare("!="),
    "and": Builder.and_,
    "or": Builder.or_,
    "xor": Builder.xor,
    "not": lambda b, x: b.xor(x, const(I1, x, 1)),
    "left": Builder.shl,
    "right": Builder.ashr,
    "unsigned_right": Builder.lshr,
    "quotient": Builder.sdiv,
    "remainder": Builder.srem,
    "unsigned_quotient": Builder.udiv,
    "bits": _bits,
    "repeat": lambda b, x: x,
}


class _Machine:
    """The builder, as traced functions know it."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def const(self, kind: str, number: float, like: ir.Value) -> ir.Value:
        """The number in as many lanes as `like` has."""
        return const(KINDS[kind], like, number)

    def emit(self, op: str, kind: str, *args: ir.Value) -> ir.Value:
        """An instruction."""
        if op == "convert":
            return convert(self.b, args[0], KINDS[kind])
        return ROWS[op](self.b, *args)


def traced(function: Callable[..., Any]) -> Row:
    """The row of a function of numbers (see traced.py). Python's numbers stay as they are."""

    def row(b: Builder, *args: ir.Value) -> ir.Value:
        return function(*(numbers(b, x)[0] if hasattr(x, "type") else x for x in args)).value

    return row


def numbers(b: Builder, *values: ir.Value) -> list[Number]:
    """Values as numbers of a traced function."""
    return [Number(_Machine(b), x, kind_of(x)) for x in values]


@routine(I64, *[I64] * 5, inline=True)
def draw_keys(b: Builder, *words: ir.Value) -> ir.Value:
    """The keys of a stream of draws (see [Note: random draws] in draws.py)."""
    return traced(draws.keys)(b, *words)


def kind_of(x: ir.Value) -> str:
    """The name of a number's kind."""
    return {F32: "f32", F64: "f64", I1: "bool", I32: "i32", I64: "i64"}[element(x)]


ROWS |= {"bitand": ROWS["and"], "bitor": ROWS["or"], "bitxor": ROWS["xor"]}
ROWS |= {name: traced(meaning.of) for name, meaning in bits.MEANINGS.items()}
ROWS["as_count"] = traced(bits.as_count)
code = traced(bits.code)


def format_bits(b: Builder, x: ir.Value, storage: str) -> ir.Value:
    """A float32 in a format of at most 16 bits, as an int32."""
    if storage == "float16" and not SOFT_HALVES:
        return b.zext(b.bitcast(b.fptrunc(x, lanes(HALF, x)), lanes(I16, x)), lanes(I32, x))
    return traced(bits.FORMATS[storage].bits)(b, x)


def format_value(b: Builder, x: ir.Value, storage: str) -> ir.Value:
    """Inverse of format_bits."""
    if storage == "float16" and not SOFT_HALVES:
        return b.fpext(b.bitcast(b.trunc(x, lanes(I16, x)), lanes(HALF, x)), lanes(F32, x))
    return traced(bits.FORMATS[storage].value)(b, x)


def _float16(b: Builder, x: ir.Value) -> ir.Value:
    """Rounded to float16, by the processor's conversions if it has them."""
    single = convert(b, x, F32)
    return convert(b, format_value(b, format_bits(b, single, "float16"), "float16"), element(x))


ROWS["float16"] = _float16


def apply(b: Builder, v: Value, args: list[ir.Value]) -> ir.Value:
    """An instruction, by its row. Loops handle those that depend on the lane themselves."""
    if v.op == "convert":
        return convert(b, args[0], KINDS[v.kind])
    if v.op == "code":
        return code(b, args[0], (1 << v.attr) - 1)
    return ROWS[v.op](b, *args)


#: operators that take many instructions as functions, for numbers of the piece
CALLED = {
    op: Routine(f"called_{op}", F64, [F64] * bits.MEANINGS[op].arity, ROWS[op]) for op in LONG
}
