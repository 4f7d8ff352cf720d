"""Writing large results past the cache.

[Note: past the cache] An ordinary store first reads the line that it writes, so a decode moves
twice the bytes that it has to, and what it writes pushes everything else out of the cache. A
non-temporal ("streaming") store of a whole line does neither. On an EPYC of family 25 one core
zeroes 48 MB at 45 GB/s so (ordinary stores 13, memset 22) and copies them at 16 (8.8; torch 11).
A result that would stay in the cache is written the usual way, as it is read again soon. Of 12
million elements, in turns: onebit_group decodes at 12 -> 23 GB/s, int8_group 12 -> 21, dgc 15 -> 50;
fp16 encodes at 14 -> 20, none 8 -> 13 (only without prefetches, which hinder so short loops).

Only AMD's processors are known to gain: on Intel's, ordinary stores with prefetches were faster
than what memset does there, and these have not been measured.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from compll.backends.cpu.called import called
from compll.backends.cpu.nontemporal_tiles import LINE

__all__ = ["past_cache", "settle", "write_past", "written_to", "zero_past"]
#: whether this processor gains
PAST = llvm.get_host_cpu_name().startswith("znver")
#: bytes from which a result is larger than what may stay in the cache
LEAST = 1 << 24
#: one in so many elements, at most, is cheaper to bring back than to keep its line until it is set
RARE = 16
I1, I8, I64, F32 = ir.IntType(1), ir.IntType(8), ir.IntType(64), ir.FloatType()
WHOLE = ir.VectorType(F32, LINE // 4)
FLOATS = types.Array(types.float32, 1, "C")


@njit(nogil=True, inline="always")
def past_cache(size):  # type: ignore[no-untyped-def]
    """Whether a result of so many bytes is written past the cache."""
    return PAST and size >= LEAST


def _skew(b: Any, to: Any) -> Any:
    """How many bytes of a line are before this address."""
    return b.and_(b.ptrtoint(to, I64), I64(LINE - 1))


def _few(b: Any, to: Any, source: Any, count: Any) -> None:
    """Copy some bytes as usual."""
    memcpy = b.module.declare_intrinsic("llvm.memcpy", [I8.as_pointer()] * 2 + [I64])
    b.call(memcpy, [to, source, count, I1(0)])


def _line(b: Any, to: Any, value: Any) -> None:
    """Store a line past the cache."""
    stored = b.store(value, b.bitcast(to, WHOLE.as_pointer()), align=LINE)
    stored.set_metadata("nontemporal", b.module.add_metadata([ir.IntType(32)(1)]))


def _aligned(b: Any, room: Any) -> Any:
    """The begin of the first line of the room."""
    return b.gep(room, [b.and_(b.neg(b.ptrtoint(room, I64)), I64(LINE - 1))])


def _block(b: Any, x: Any, stop: Any, room: Any, size: Any) -> None:
    """See write_past; all sizes are in bytes."""
    skew = _skew(b, x)
    filled = b.sub(b.udiv(stop, size), I64(1))
    half = b.add(size, I64(LINE))
    odd = b.icmp_signed("==", b.and_(filled, I64(1)), I64(1))
    begin = b.gep(_aligned(b, room), [b.sub(I64(LINE), skew)])
    this = b.gep(begin, [b.select(odd, half, I64(0))])
    other = b.gep(begin, [b.select(odd, I64(0), half)])
    with b.if_then(b.icmp_signed(">", filled, I64(0))):
        start = b.mul(b.sub(filled, I64(1)), size)
        first = b.and_(b.icmp_signed("==", start, I64(0)), b.icmp_signed("!=", skew, I64(0)))
        with b.if_then(first):
            _few(b, x, b.gep(other, [skew]), b.sub(I64(LINE), skew))
        to = b.gep(x, [b.sub(start, skew)])
        with cgutils.for_range(b, b.udiv(size, I64(LINE)), b.zext(first, I64)) as loop:
            at = b.mul(loop.index, I64(LINE))
            line = b.load(b.bitcast(b.gep(other, [at]), WHOLE.as_pointer()), align=1)
            _line(b, b.gep(to, [at]), line)
    _few(b, other, b.gep(this, [size]), skew)


def _zeros(b: Any, to: Any, size: Any) -> None:
    """Zeros, those of whole lines past the cache."""
    memset = b.module.declare_intrinsic("llvm.memset", [I8.as_pointer(), I64])
    head = b.and_(b.neg(b.ptrtoint(to, I64)), I64(LINE - 1))
    head = b.select(b.icmp_signed("<", head, size), head, size)
    lines = b.udiv(b.sub(size, head), I64(LINE))
    done = b.add(head, b.mul(lines, I64(LINE)))
    b.call(memset, [to, I8(0), head, I1(0)])
    with cgutils.for_range(b, lines) as loop:
        _line(b, b.gep(to, [b.add(head, b.mul(loop.index, I64(LINE)))]), WHOLE(None))
    b.call(memset, [b.gep(to, [done]), I8(0), b.sub(size, done), I1(0)])


def _bytes(context: Any, b: Any, kind: Any, value: Any) -> Any:
    """The address of an array's data."""
    return b.bitcast(context.make_array(kind)(context, b, value).data, I8.as_pointer())


def _size(kind: Any) -> Any:
    """Bytes of an array's item."""
    return I64(kind.dtype.bitwidth // 8)


def _lead_of(typing: Any, x: Any) -> Any:
    """How many items there would be before those of x in the line of its first."""

    def emit(context: Any, b: Any, signature: Any, v: Any) -> Any:
        return b.udiv(_skew(b, _bytes(context, b, x, v[0])), _size(x))

    return types.int64(x), emit


def _written_to(typing: Any, x: Any, room: Any, past: Any) -> Any:
    """Where the items of x go: there or, if `past`, to the room, for write_past to find.

    Holds no reference to either: counting them takes longer than a short tile.
    """

    def emit(context: Any, b: Any, signature: Any, v: Any) -> Any:
        usual, other = (context.make_array(x)(context, b, one) for one in v[:2])
        first = b.gep(_aligned(b, b.bitcast(other.data, I8.as_pointer())), [I64(LINE)])
        found = context.make_array(x)(context, b)
        arrayobj.populate_array(
            found,
            data=b.select(v[2], b.bitcast(first, usual.data.type), usual.data),
            shape=[b.select(v[2], other.nitems, usual.nitems)],
            strides=[_size(x)],
            itemsize=_size(x),
            meminfo=None,
        )
        return found._getvalue()

    return x(x, x, types.boolean), emit


def _write_past(typing: Any, x: Any, stop: Any, room: Any, size: Any) -> Any:
    """Now that x[:stop] is known, a multiple of `size`, write the block before the last of it.

    The room, of 2 * size items and 3 lines, has two halves, for one block each. Before a block's
    items, which begin with a line, stand those of the one before that fill no line of x. Only whole
    lines are written past the cache: one that is written in two ways takes ten times as long. And
    what has just been stored can be read back only when it has left the processor's store buffer,
    hence the block before. `size` fills whole lines; settle() writes what is left.
    """

    def emit(context: Any, b: Any, signature: Any, v: Any) -> Any:
        items = _size(x)
        arrays = [_bytes(context, b, x, one) for one in (v[0], v[2])]
        given = [arrays[0], b.mul(v[1], items), arrays[1], b.mul(v[3], items)]
        called(b, "compll_past", given, _block)
        return context.get_dummy_value()

    return types.void(x, types.int64, x, types.int64), emit


def _zeros_past(typing: Any, x: Any) -> Any:
    """x = 0, whole lines past the cache."""

    def emit(context: Any, b: Any, signature: Any, v: Any) -> Any:
        count = context.make_array(FLOATS)(context, b, v[0]).nitems
        size = b.mul(count, I64(4))
        called(b, "compll_zeros", [_bytes(context, b, FLOATS, v[0]), size], _zeros)
        return context.get_dummy_value()

    return types.void(FLOATS), emit


def _fence(typing: Any) -> Any:
    """What was written past the cache is there for all threads."""

    def emit(context: Any, b: Any, signature: Any, v: Any) -> Any:
        if llvm.get_process_triple().startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse.sfence"), [])
        return context.get_dummy_value()

    return types.void(), emit


# As values, since mypy would have them called as they are declared.
lead_of: Any = intrinsic(_lead_of)
written_to: Any = intrinsic(_written_to)
write_past: Any = intrinsic(_write_past)
zeros_past: Any = intrinsic(_zeros_past)
fence: Any = intrinsic(_fence)


@njit(nogil=True)
def settle(x, done, room, size):  # type: ignore[no-untyped-def]
    """After the last write_past: x[:done] is written, for all threads."""
    line = LINE // x.itemsize
    lead, first = lead_of(x), line + (-lead_of(room)) % line
    begin = max(0, (done // size - 1) * size - lead)
    for i in range(begin, done):
        block, place = divmod(i + lead, size)
        x[i] = room[first + (block & 1) * (size + line) + place - lead]
    fence()


@njit(nogil=True)
def zero_past(x, few):  # type: ignore[no-untyped-def]
    """x = 0 past the cache, if x is so large and `few` elements of it are written later; how many
    elements were."""
    if not past_cache(8 * len(x)) or few > len(x) // RARE:  # little of it will be read soon
        return 0
    zeros_past(x)
    fence()
    return len(x)
