"""Primitives of the generated CPU kernels that read, write and prefetch arrays.

Loads and stores take bytes at any place of an array of bytes. What is prefetched when: see
[Note: prefetch] in cpu/prefetch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from compll.backends.cpu.ops import (
    F32,
    HALF,
    I8,
    I16,
    I32,
    _bf16_bits,
    _c,
    _primitive,
    b1,
    f32,
    i64,
)

BYTES = types.Array(types.uint8, 1, "C")


def _address(context: Any, b: Any, array: Any, at: Any, kind: Any) -> Any:
    target, signature = context
    data = target.make_array(signature.args[0])(target, b, array).data
    return b.bitcast(b.gep(data, [at]), kind.as_pointer())


def _store(kind: Any, value: Any, convert: Callable[[Any, Any], Any]) -> Any:
    def emit(context: Any, b: Any, v: Any) -> Any:
        b.store(convert(b, v[2]), _address(context, b, v[0], v[1], kind), align=1)
        return context[0].get_dummy_value()

    return _primitive(types.void, (BYTES, i64, value), emit)


def _load(kind: Any, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    def emit(context: Any, b: Any, v: Any) -> Any:
        return convert(b, b.load(_address(context, b, v[0], v[1], kind), align=1))

    return _primitive(result, (BYTES, i64), emit)


store_float32 = _store(F32, f32, lambda b, x: x)
store_float16 = _store(HALF, f32, lambda b, x: b.fptrunc(x, HALF))
store_bfloat16 = _store(I16, f32, lambda b, x: b.trunc(_bf16_bits(b, x), I16))
store_int32 = store_uint32 = _store(I32, i64, lambda b, x: b.trunc(x, I32))
store_uint16 = _store(I16, i64, lambda b, x: b.trunc(x, I16))
load_float32 = _load(F32, f32, lambda b, x: x)
load_float16 = _load(HALF, f32, lambda b, x: b.fpext(x, F32))
load_bfloat16 = _load(I16, f32, lambda b, x: b.bitcast(b.shl(b.zext(x, I32), _c(16)), F32))
load_int32 = _load(I32, i64, lambda b, x: b.sext(x, ir.IntType(64)))
load_uint32 = _load(I32, i64, lambda b, x: b.zext(x, ir.IntType(64)))
load_uint16 = _load(I16, i64, lambda b, x: b.zext(x, ir.IntType(64)))
#: whether any of eight bytes is not zero
any_of8 = _load(
    ir.IntType(64), b1, lambda b, x: b.icmp_unsigned("!=", x, ir.Constant(ir.IntType(64), 0))
)
#: eight bytes, little-endian
load_word = _load(ir.IntType(64), types.uint64, lambda b, x: x)

#: bytes of the first level of the cache that hold one array's tiles and what is computed of them
SMALL = 32 << 10


def first_level() -> int:
    """Bytes of the first level of the processor's cache, SMALL if unknown."""
    place = Path("/sys/devices/system/cpu/cpu0/cache/index0")
    try:
        if (place / "type").read_text().strip() == "Data":
            return int((place / "size").read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):  # not on Linux, or hidden
        pass
    return SMALL


#: how near: the first level of the cache; for walks over several arrays the second where the first
#: is small, and then so many elements earlier; see [Note: prefetch]
NEAREST = 3
NEAR, EARLIER = (2, 1024) if first_level() <= SMALL else (NEAREST, 0)


def _fetches(
    target: Any, b: Any, kind: Any, array: Any, at: Any, count: int, how: int = NEAREST
) -> None:
    """Prefetch array[at : at + count], which may lie outside."""
    name = "llvm.prefetch.p0"
    parameters = [I8.as_pointer(), I32, I32, I32]
    fetch = b.module.globals.get(name) or ir.Function(
        b.module, ir.FunctionType(ir.VoidType(), parameters), name
    )
    read, level, data_cache = _c(0), _c(how), _c(1)
    data = target.make_array(kind)(target, b, array).data
    first = b.bitcast(b.gep(data, [at]), I8.as_pointer())
    for line in range(0, count * kind.dtype.bitwidth // 8, 64):
        place = b.gep(first, [ir.Constant(ir.IntType(64), line)])
        b.call(fetch, [place, read, level, data_cache])


def _prefetch(count: int, how: int = NEAREST) -> Any:
    """prefetch(x, i): bring x[i : i + count] nearer."""

    @intrinsic
    def prefetch(typing: Any, x: Any, i: Any) -> Any:
        def emit(target: Any, b: Any, signature: Any, v: Any) -> Any:
            _fetches(target, b, x, v[0], v[1], count, how)
            return target.get_dummy_value()

        return types.void(x, i64), emit

    return prefetch


def _ask(count: int, arrays: int) -> Any:
    """ask(i, end, x, ...): where i < end, prefetch(x, i), ... and i + count; else i.

    As one call, since numba takes a millisecond for every statement. See [Note: prefetch].
    """
    how = NEAREST if arrays == 1 else NEAR

    def ask(kinds: Any) -> Any:
        def emit(target: Any, b: Any, signature: Any, v: Any) -> Any:
            wanted = b.icmp_signed("<", v[0], v[1])
            before = b.block
            with b.if_then(wanted):
                for kind, array in zip(kinds, v[2:], strict=True):
                    _fetches(target, b, kind, array, v[0], count, how)
                after, asked = b.block, b.add(v[0], ir.Constant(v[0].type, count))
            found = b.phi(v[0].type)
            found.add_incoming(v[0], before)
            found.add_incoming(asked, after)
            return found

        return i64(i64, i64, *kinds), emit

    names = ", ".join(f"a{i}" for i in range(arrays))
    scope: dict[str, Any] = {"ask": ask}
    exec(f"def declare(typing, i, end, {names}):\n    return ask(({names},))", scope)
    return intrinsic(scope["declare"])


prefetch64, prefetch128 = _prefetch(64), _prefetch(128)
prefetch256, prefetch512 = _prefetch(256), _prefetch(512)
near64, near128, near256, near512 = (_prefetch(count, NEAR) for count in (64, 128, 256, 512))
ask64_1, ask64_2, ask64_3, ask64_4 = (_ask(64, arrays) for arrays in (1, 2, 3, 4))
ask128_1, ask128_2, ask128_3, ask128_4 = (_ask(128, arrays) for arrays in (1, 2, 3, 4))
ask256_1, ask256_2, ask256_3, ask256_4 = (_ask(256, arrays) for arrays in (1, 2, 3, 4))
