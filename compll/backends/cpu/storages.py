"""Values in memory that are not packed: float32 and int32, or storages of 16 bits and fewer."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import Builder
from compll.backends.cpu.processor import FEATURES
from compll.backends.cpu.types import F32, I8, I16, I32, const, lanes, number
from compll.ir.tile import Array
from compll.numerics.bits import FORMATS, HUGE

#: true if this processor stores some lanes of a vector as fast as all of them
MASKED = bool(FEATURES.get("avx512f"))
#: bits of HUGE
TOO_LARGE = int(np.float32(HUGE).view(np.int32))
#: storages of at most 16 bits
NARROW = {"uint16": 16, "byte": 8} | {name: one.width for name, one in FORMATS.items()}


def item_bytes(array: Array) -> int:
    """Bytes of one value in memory."""
    return array.storage.bits // 8


def load_as(b: Builder, pointer: ir.Value, storage: str, count: int) -> ir.Value:
    """Values of a storage as float32 or int32; count 0: a single one, not a vector."""

    def of(kind: ir.Type) -> ir.Value:
        return b.load(pointer, typ=ir.VectorType(kind, count) if count else kind, align=1)

    return of_raw(b, of(raw(storage)), storage)


def raw(storage: str) -> ir.Type:
    """The type of a value in memory."""
    if storage in NARROW:
        return I8 if NARROW[storage] == 8 else I16
    return F32 if storage == "float32" else I32


def of_raw(b: Builder, x: ir.Value, storage: str) -> ir.Value:
    """Values as they are in memory, converted to float32 or int32."""
    x = b.zext(x, lanes(I32, x)) if storage in NARROW else x
    return ins.format_value(b, x, storage) if storage in FORMATS else x


def stored_as(b: Builder, x: ir.Value, storage: str) -> ir.Value:
    """The value in memory for a float32 or int32."""
    x = ins.format_bits(b, x, storage) if storage in FORMATS else x
    return b.trunc(x, lanes(raw(storage), x)) if storage in NARROW else x


def finite_or(b: Builder, value: ir.Value, before: ir.Value, storage: str) -> ir.Value:
    """A state's value; the old value if the new one is NaN, or not below HUGE, once stored.

    [Note: masked stores] LLVM turns a choice between a value and the old one into a masked store.
    On AMD's processors without AVX-512 that takes 12 cycles and more. So bits are blended there,
    with a mask that LLVM cannot recognize as one.
    """
    too_large = {"bfloat16": TOO_LARGE - 0x8000, "float16": 0x477FF000}.get(storage, TOO_LARGE)
    size, least = ins.ROWS["magnitude_bits"](b, value), const(I32, value, too_large)
    if MASKED:
        return b.select(b.icmp_signed("<", size, least), value, before)
    old, new = ins.ROWS["bits"](b, before), ins.ROWS["bits"](b, value)
    hidden = b.asm(ir.FunctionType(I32, [I32]), "", "=r,0", [number(I32, 31)], side_effect=False)
    shift = b.splat(hidden, size.type.count) if size.type != I32 else hidden
    mask = b.ashr(b.sub(size, least), shift)
    return b.bitcast(b.xor(old, b.and_(b.xor(old, new), mask)), value.type)
