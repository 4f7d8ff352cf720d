"""LLVM's types and constants."""

from __future__ import annotations

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, F32, F64, PTR, VOID = (
    ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.PointerType(), ir.VoidType(),
)  # fmt: skip
#: bytes of an element
SIZES = {I8: 1, I16: 2, I32: 4, F32: 4, I64: 8, F64: 8}
KINDS = {"f32": F32, "i32": I32, "bool": I1, "f64": F64, "i64": I64, "table": PTR}


def lanes(kind: ir.Type, like: ir.Value) -> ir.Type:
    """The type with elements of `kind` and as many lanes as the value `like`."""
    return ir.VectorType(kind, like.type.count) if isinstance(like.type, ir.VectorType) else kind


def const(kind: ir.Type, like: ir.Value, number: float) -> ir.Value:
    """The number in every lane."""
    made = lanes(kind, like)
    return ir.Constant(made, [number] * made.count if made is not kind else number)


def element(x: ir.Value) -> ir.Type:
    """The type of one lane."""
    return x.type.element if isinstance(x.type, ir.VectorType) else x.type


def number(kind: ir.Type, value: float) -> ir.Value:
    """A constant."""
    return ir.Constant(kind, value)


def c(value: int) -> ir.Value:
    """An int64 constant."""
    return number(I64, value)
