"""LLVM IR of a tile program's instructions, for a number or for a vector of lanes.

ROWS has each of LLVM's; those of bits.py are traced. All are IEEE operations in the order that the
language defines: no row has fast-math flags, and none is fused with another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llvmlite import ir

from compll.backends.cpu import jit
from compll.backends.cpu.builder import (
    F32,
    F64,
    HALF,
    I1,
    I8,
    I16,
    I32,
    I64,
    KINDS,
    PTR,
    SIZES,
    VOID,
    Builder,
    Routine,
    Variable,
    at,
    c,
    const,
    element,
    lanes,
    loop,
    number,
    repeat_while,
    routine,
)
from compll.backends.cpu.jit import FEATURES
from compll.ir.tile import Array, Value
from compll.numerics import bits, draws
from compll.numerics.bits import FORMATS, HUGE
from compll.numerics.traced import Number
from compll.routines import language
from compll.routines.tables import SHIFT, SLOTS

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
    "popcount": Builder.ctpop,
    "clz": lambda b, x: b.ctlz(x, number(I1, 0)),
    "ctz": lambda b, x: b.cttz(x, number(I1, 0)),
    "likely": lambda b, x: b.expect(x, 1),
    "unlikely": lambda b, x: b.expect(x, 0),
    "swapped": Builder.bswap,
    "any_bits": unary("vector.reduce.or"),
    "sum_of": unary("vector.reduce.add"),
    "running": lambda b, x: b.running(x),
    "last": lambda b, x: b.extract_element(x, number(I32, x.type.count - 1)),
    "mask": lambda b, x: b.zext(b.bitcast(x, ir.IntType(x.type.count)), I64),
}


class _Machine:
    """The builder, as traced functions and routines know it."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def const(self, kind: str, number: float, like: ir.Value | None) -> ir.Value:
        """The number in as many lanes as `like` has."""
        return (
            ir.Constant(KINDS[kind], number) if like is None else const(KINDS[kind], like, number)
        )

    def emit(self, op: str, kind: str, *args: ir.Value) -> ir.Value:
        """An instruction."""
        if op == "convert":
            return convert(self.b, args[0], KINDS[kind])
        return ROWS[op](self.b, *args)

    def variable(self, kind: str, value: ir.Value) -> Variable:
        """A variable on the stack, which LLVM turns into values."""
        return Variable(self.b, value)

    def get(self, variable: Variable) -> ir.Value:
        """Its value."""
        return variable.get()

    def set(self, variable: Variable, value: ir.Value) -> None:
        """Assign a value."""
        variable.set(value)

    def branch(
        self, condition: ir.Value, then: Callable[[], None], other: Callable[[], None]
    ) -> None:
        """A branch, by a condition."""
        with self.b.if_else(condition) as (first, second):
            with first:
                then()
            with second:
                other()

    def repeat(self, condition: Callable[[], ir.Value], body: Callable[[], None]) -> None:
        """A body as long as a condition holds."""
        with repeat_while(self.b, condition):
            body()

    def loop(
        self, start: ir.Value, stop: ir.Value, step: int, body: Callable[[ir.Value], None]
    ) -> None:
        """A body for start, start + step, ... below stop."""
        with loop(self.b, stop, step, start) as index:
            body(index)

    def call(
        self, routine: language.Routine, args: list[ir.Value], constants: dict[str, int]
    ) -> ir.Value:
        """A call of a routine."""
        return function(routine, **constants)(self.b, *args)


#: elements of arrays of routines
ELEMENTS = {"u8": I8, "u16": I16, "i32": I32, "i64": I64, "f32": F32}


def bytes_of(b: Builder, element: str, count: ir.Value) -> ir.Value:
    """Bytes of elements."""
    return b.mul(count, c(SIZES[ELEMENTS[element]]))


def load(b: Builder, array: ir.Value, element: str, index: ir.Value, count: int) -> ir.Value:
    """An element of 64 bits or a float; or a vector of `count` elements, of at least 32 bits."""
    kind, wide = ELEMENTS[element], I32 if count else I64
    value = b.get(array, kind, index, count)
    if kind in (F32, I64, wide):
        return value
    return (b.sext if element == "i32" else b.zext)(value, lanes(wide, value))


def store(b: Builder, array: ir.Value, element: str, index: ir.Value, value: ir.Value) -> None:
    """Store a number or a vector."""
    kind = lanes(ELEMENTS[element], value)
    b.put(value if value.type == kind else b.trunc(value, kind), array, index)


ROWS |= {
    "load": load,
    "store": store,
    "moved": lambda b, array, element, index: at(b, array, bytes_of(b, element, index)),
    "local": lambda b, element, count: b.stack(ELEMENTS[element], count),
    "splat": Builder.splat,
    "clear": lambda b, array, element, count: b.clear(array, bytes_of(b, element, count)),
    "copy": lambda b, to, element, count, array: b.copy(to, array, bytes_of(b, element, count)),
}


def function(routine: language.Routine, **constants: int) -> Routine:
    """A routine as a function that a module's kernels share."""

    def body(b: Builder, *args: ir.Value) -> ir.Value:
        return routine.printed(_Machine(b), args, constants)

    name = "_".join([routine.name, *map(str, constants.values())])
    kinds = [I64 if kind == "int" else PTR for kind in routine.kinds]
    return Routine(name, I64 if routine.result else VOID, kinds, body)


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


# ---- storages -----------------------------------------------------------------------------------
# Values in memory that are not packed: float32 and int32, or storages of 16 bits and fewer.

#: true if this processor stores some lanes of a vector as fast as all of them
MASKED = bool(FEATURES.get("avx512f"))
#: bits of HUGE
TOO_LARGE = int(np.float32(HUGE).view(np.int32))
#: storages of at most 16 bits
NARROW = {"uint16": 16, "byte": 8} | {name: form.width for name, form in FORMATS.items()}


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
    return format_value(b, x, storage) if storage in FORMATS else x


def stored_as(b: Builder, x: ir.Value, storage: str) -> ir.Value:
    """The value in memory for a float32 or int32."""
    x = format_bits(b, x, storage) if storage in FORMATS else x
    return b.trunc(x, lanes(raw(storage), x)) if storage in NARROW else x


def finite_or(b: Builder, value: ir.Value, before: ir.Value, storage: str) -> ir.Value:
    """A state's value; the old value if the new one is NaN, or not below HUGE, once stored.

    [Note: masked stores] LLVM turns a choice between a value and the old one into a masked store.
    On AMD's processors without AVX-512 that takes 12 cycles and more. So bits are blended there,
    with a mask that LLVM cannot recognize as one.
    """
    too_large = {"bfloat16": TOO_LARGE - 0x8000, "float16": 0x477FF000}.get(storage, TOO_LARGE)
    size, least = ROWS["magnitude_bits"](b, value), const(I32, value, too_large)
    if MASKED:
        return b.select(b.icmp_signed("<", size, least), value, before)
    old, new = ROWS["bits"](b, before), ROWS["bits"](b, value)
    hidden = b.asm(ir.FunctionType(I32, [I32]), "", "=r,0", [number(I32, 31)], side_effect=False)
    shift = b.splat(hidden, size.type.count) if size.type != I32 else hidden
    mask = b.ashr(b.sub(size, least), shift)
    return b.bitcast(b.xor(old, b.and_(b.xor(old, new), mask)), value.type)


# ---- compaction ---------------------------------------------------------------------------------
# Compaction within a walk: selected lanes are appended to arrays, in order.
# llvm.experimental.vector.compress is one instruction with AVX-512; elsewhere LLVM stores each
# lane and advances if it is selected, without a branch. Whole vectors are written, so arrays
# have SLACK (interface.py) more elements than they hold.

#: true if this processor compresses lanes in one instruction, which is cheaper than a branch
COMPRESSES = bool(FEATURES.get("avx512f"))


def count_bits(b: Builder, x: ir.Value) -> ir.Value:
    """The number of set bits, as int64."""
    return b.zext(b.ctpop(x), I64)


class Compaction:
    """The instructions of one Compact in a walk's function.

    counts: address of the number of elements taken so far, and of the number that `first` may still
    take.
    """

    def __init__(self, b: Builder, counts: ir.Value, arrays: list[ir.Value]) -> None:
        self.b, self.counts, self.arrays = b, counts, arrays
        self.taken, self.left = (Variable(b, b.get(counts, I64, c(i))) for i in range(2))

    def close(self) -> None:
        """Store the counts, after the last tile."""
        for i, now in enumerate((self.taken, self.left)):
            self.b.put(now.get(), self.counts, c(i))

    def lanes(self, always: ir.Value, first: ir.Value, parts: list[ir.Value]) -> ir.Value:
        """Append the selected lanes; returns a mask of them. parts: the values for each array."""
        b = self.b
        like = always if always is not None else first
        result: ir.Value = number(I32, 0)
        if always is not None:
            result = self.bits(always)
        if first is not None:
            result = b.or_(result, self.limited(self.bits(first)))
        hit = b.bitcast(b.trunc(result, ir.IntType(like.type.count)), like.type)
        if COMPRESSES:
            self.append(parts, hit, result)
        else:
            with b.if_then(b.icmp_unsigned("!=", result, number(I32, 0))):
                self.append(parts, hit, result)
        return hit

    def append(self, parts: list[ir.Value], hit: ir.Value, bits: ir.Value) -> None:
        """Store the selected lanes, and advance by their number."""
        b, taken = self.b, self.taken.get()
        for array, value in zip(self.arrays, parts, strict=True):
            b.put(self.together(value, hit), array, taken)
        self.taken.set(b.add(taken, count_bits(b, bits)))

    def bits(self, mask: ir.Value) -> ir.Value:
        """A vector of truths as the bits of a word."""
        return self.b.zext(self.b.bitcast(mask, ir.IntType(mask.type.count)), I32)

    def limited(self, bits: ir.Value) -> ir.Value:
        """The first set bits, as many as may still be taken."""
        b, word = self.b, Variable(self.b, bits)
        with b.if_then(b.icmp_unsigned("!=", bits, number(I32, 0)), likely=False):
            left = b.sub(self.left.get(), count_bits(b, bits))
            few = b.icmp_signed("<", left, c(0))
            self.left.set(b.select(few, c(0), left))
            with b.if_then(few, likely=False), loop(b, b.neg(left)):
                highest = b.lshr(number(I32, -(2**31)), b.ctlz(word.get(), number(I1, 0)))
                word.set(b.xor(word.get(), highest))
        return word.get()

    def together(self, value: ir.Value, hit: ir.Value) -> ir.Value:
        """The selected lanes, moved to the start of a vector."""
        b, kind = self.b, value.type
        letter = "f32" if kind.element == F32 else "i32"
        full = f"llvm.experimental.vector.compress.v{kind.count}{letter}"
        compress = b.declared(full, kind, [kind, hit.type, kind])
        return b.call(compress, [value, hit, ir.Constant(kind, ir.Undefined)])


def expanded(b: Builder, place: ir.Value, hit: ir.Value, bits: ir.Value) -> ir.Value:
    """The next float32 values from an address on, in order, in the lanes of `hit`; zeros in the
    others. bits: `hit` as a number."""
    width = hit.type.count
    kind = ir.VectorType(F32, width)
    zeros = ir.Constant(kind, [0.0] * width)
    if COMPRESSES:
        expand = b.declared(f"llvm.masked.expandload.v{width}f32", kind, [PTR, hit.type, kind])
        return b.call(expand, [place, hit, zeros])
    result = Variable(b, zeros)
    with b.if_then(b.icmp_unsigned("!=", bits, number(I32, 0))):
        # without a branch: lanes behind the last value read the last value
        last, taken, lanes = b.sub(b.ctpop(bits), number(I32, 1)), number(I32, 0), zeros
        for lane in range(width):
            near = b.select(b.icmp_unsigned("<", taken, last), taken, last)
            value = b.get(place, F32, b.zext(near, I64))
            lanes = b.insert_element(lanes, value, number(I32, lane))
            taken = b.add(taken, b.and_(b.lshr(bits, number(I32, lane)), number(I32, 1)))
        result.set(b.select(hit, lanes, zeros))
    return result.get()


# ---- nontemporal stores -------------------------------------------------------------------------
# Stores that bypass the cache, for arrays that it cannot hold; see docs/how/tile-ir.md.

#: bytes from which stores to an array bypass the cache, which cannot hold it
PAST = 1 << 24


def gains() -> bool:
    """True if this processor is known to gain from them."""
    return jit.NAME.startswith("znver")


def zero(b: Builder, pointer: ir.Value, size: ir.Value) -> None:
    """Set `size` bytes to 0. If the cache cannot hold them they bypass it, which gains on all
    processors: a cache would first load the bytes to be overwritten."""
    with b.if_else(large(b, [(pointer, size)])) as (then, otherwise):
        with then:
            start = b.and_(b.neg(b.ptrtoint(pointer, I64)), number(I64, 63))
            lines = b.add(start, b.and_(b.sub(size, start), number(I64, -64)))
            _clear(b, pointer, number(I64, 0), start)
            with loop(b, lines, 64, start) as offset:
                zeros = ir.Constant(ir.VectorType(F32, 16), None)
                made = b.store(zeros, at(b, pointer, offset), align=64)
                made.set_metadata("nontemporal", b.module.add_metadata([number(I32, 1)]))
            _clear(b, pointer, lines, size)
            b.fence("seq_cst")
        with otherwise:
            _clear(b, pointer, number(I64, 0), size)


def _clear(b: Builder, pointer: ir.Value, start: ir.Value, stop: ir.Value) -> None:
    """Set bytes from `start` to `stop` to 0."""
    b.clear(at(b, pointer, start), b.sub(stop, start))


def large(b: Builder, arrays: Iterable[tuple[ir.Value, ir.Value]]) -> ir.Value:
    """True if the cache cannot hold the arrays and their addresses allow stores that bypass it.

    arrays: address and bytes of each.
    """
    result: ir.Value = number(I1, 1)
    for pointer, size in arrays:
        much = b.icmp_signed(">=", size, number(I64, PAST))
        even = b.and_(b.ptrtoint(pointer, I64), number(I64, 15))
        aligned = b.icmp_unsigned("==", even, number(I64, 0))
        result = b.and_(result, b.and_(much, aligned))
    return result


# ---- tables -------------------------------------------------------------------------------------


def bucket(b: Builder, table: ir.Value, keys: ir.Value, edges: int) -> ir.Value:
    """The number of edges that are not above each order key. table: from `buckets`."""
    count = keys.type.count
    kind = ir.VectorType(I32, count)

    def of(value: int) -> ir.Value:
        return ir.Constant(kind, [value] * count)

    starts, sorted_ = at(b, table, c(8)), at(b, table, c(8 + 4 * (SLOTS + 1)))
    slots = b.lshr(b.xor(keys, of(-(2**31))), of(SHIFT))
    result = Variable(b, gathered(b, starts, slots, I32))
    steps = b.load(table, typ=I64)
    with loop(b, steps) as turn:
        by = b.shl(number(I32, 1), b.trunc(b.sub(b.sub(steps, turn), c(1)), I32))
        ahead = b.add(result.get(), b.splat(by, count))
        edge = gathered(b, sorted_, b.sub(ahead, of(1)), I32)
        result.set(b.select(b.icmp_signed("<=", edge, keys), ahead, result.get()))
    most = of(edges)  # a NaN may reach the padding of the keys, too
    return b.select(b.icmp_signed("<", result.get(), most), result.get(), most)


def gathered(b: Builder, array: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Elements at the index of each lane."""
    result: ir.Value = ir.Constant(ir.VectorType(kind, index.type.count), ir.Undefined)
    for lane in range(index.type.count):
        place = b.zext(b.extract_element(index, number(I32, lane)), I64)
        result = b.insert_element(result, b.get(array, kind, place), number(I32, lane))
    return result


def clipped(b: Builder, index: ir.Value, size: int) -> ir.Value:
    """An index of a table, or one per lane: 0 if it is below, the last beyond the end."""
    kind = index.type
    low, high = (
        ir.Constant(kind, [v] * kind.count if isinstance(kind, ir.VectorType) else v)
        for v in (0, size - 1)
    )
    index = b.select(b.icmp_signed("<", index, low), low, index)
    return b.select(b.icmp_signed(">", index, high), high, index)
