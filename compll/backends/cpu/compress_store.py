"""Sixteen elements at a time: those that a mask of bytes selects, put together; or taken apart.

[Note: squeezing] With AVX-512 an instruction does it for a whole vector, and how many are selected
then costs nothing: 1.3 GB/s become 7 where most are, 10 become 17 at one in a hundred. Elsewhere
each is stored, and the place moves on if it was selected, without a branch.

Sixteen elements are always written, of which those beyond the selected mean nothing: arrays have
SLACK more elements than they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compll.backends.cpu.called import called
from compll.backends.cpu.memory import BYTES, _address
from compll.backends.cpu.ops import F32, I8, I32, _primitive, b1, i64, u8
from compll.backends.cpu.text import STEP

#: selected elements of a step that are taken one after the other
FEW = 6
#: pairs of arrays that one call squeezes, at most
ARRAYS = 4
I1, I64 = ir.IntType(1), ir.IntType(64)
KINDS = {"float32": (F32, "f32"), "int32": (I32, "i32"), "int64": (I64, "i64")}


def vectors(target: Any) -> bool:
    """Whether the processor compiled for has the instructions."""
    # not among what numba documents; without it, no instructions
    return "+avx512f" in str(getattr(target.codegen(), "_tm_features", "")).split(",")


def named(target: Any, name: str) -> str:
    """The name of a function that depends on whether it has the instructions."""
    return f"compll_{name}{'' if vectors(target) else '_plain'}"


def _mask(b: Any, hit: Any, at: Any, count: int = STEP) -> Any:
    """The bytes hit[at : at + count] as bits."""
    lanes = ir.VectorType(I8, count)
    read = b.load(b.bitcast(b.gep(hit, [at]), lanes.as_pointer()), align=1)
    return b.icmp_unsigned("!=", read, ir.Constant(lanes, [0] * count))


def _count(b: Any, mask: Any, width: int) -> Any:
    whole = ir.IntType(width)
    found = b.call(b.module.declare_intrinsic("llvm.ctpop", [whole]), [b.bitcast(mask, whole)])
    return b.zext(found, I64)


def _call(b: Any, name: str, lanes: Any, values: list[Any]) -> Any:
    """A function of the processor from vectors and a mask to a vector."""
    kinds = [value.type for value in values]
    known = b.module.globals.get(name)
    return b.call(known or ir.Function(b.module, ir.FunctionType(lanes, kinds), name), values)


def _part(b: Any, vector: Any, first: int, count: int) -> Any:
    """Lanes first : first + count."""
    chosen = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
    return b.shuffle_vector(vector, vector, chosen)


def _squeezed(target: Any, b: Any, kind: str, mask: Any, values: Any, to: Any) -> None:
    """Store the selected of sixteen values at an address, and others behind them."""
    item, letters = KINDS[kind]
    if not vectors(target):
        for lane in range(STEP):
            number = ir.Constant(I32, lane)
            b.store(b.extract_element(values, number), to)
            to = b.gep(to, [b.zext(b.extract_element(mask, number), I64)])
        return
    count = 512 // int(letters[1:])
    lanes = ir.VectorType(item, count)
    for first in range(0, STEP, count):
        chosen, part = _part(b, mask, first, count), _part(b, values, first, count)
        name = f"llvm.x86.avx512.mask.compress.v{count}{letters}"
        together = _call(b, name, lanes, [part, ir.Constant(lanes, ir.Undefined), chosen])
        b.store(together, b.bitcast(to, lanes.as_pointer()), align=1)
        to = b.gep(to, [_count(b, chosen, count)])


def _loaded(b: Any, pointer: Any) -> Any:
    """Sixteen elements from an address on."""
    lanes = ir.VectorType(pointer.type.pointee, STEP)
    return b.load(b.bitcast(pointer, lanes.as_pointer()), align=1)


def _counted(b: Any, first: Any) -> Any:
    """Sixteen numbers from `first` on."""
    lanes = ir.VectorType(I64, STEP)
    one = b.insert_element(ir.Constant(lanes, ir.Undefined), first, ir.Constant(I32, 0))
    every = b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, STEP), [0] * STEP))
    return b.add(every, ir.Constant(lanes, list(range(STEP))))


@contextmanager
def _steps(b: Any, count: Any, step: int = STEP) -> Iterator[Any]:
    """A loop over so many elements, with the first of each step."""
    with cgutils.for_range(b, b.udiv(count, ir.Constant(I64, step))) as loop:
        yield b.mul(loop.index, ir.Constant(I64, step))


class Squeeze:
    """What emits the body of squeeze or place, of these arguments and for these kinds of arrays."""

    def __init__(self, target: Any, b: Any, kinds: list[str], placed: bool, args: Any) -> None:
        self.target, self.b = target, b
        self.hit, self.count, self.first, k = args[:4]
        self.positions = args[4:6] if placed else None
        arrays = args[4 + 2 * placed :]
        self.pairs = list(zip(kinds, arrays[::2], arrays[1::2], strict=True))
        self.k = cgutils.alloca_once_value(b, k)
        self.mask = cgutils.alloca_once(b, I64)

    def run(self, step: int) -> Any:
        """The loop over the tile; how many are selected by now."""
        b = self.b
        with _steps(b, self.count, step) as at:
            bits = b.zext(b.bitcast(_mask(b, self.hit, at, step), ir.IntType(step)), I64)
            ones = b.call(b.module.declare_intrinsic("llvm.ctpop", [I64]), [bits])
            many = b.icmp_unsigned(">", ones, ir.Constant(I64, FEW))
            with b.if_else(many) as (then, otherwise):
                with then:
                    for i in range(0, step, STEP):
                        self.sixteen(b.add(at, ir.Constant(I64, i)))
                with otherwise:
                    self.each(at, bits, ones)
        return b.load(self.k)

    def sixteen(self, at: Any) -> None:
        b, k = self.b, self.b.load(self.k)
        mask = _mask(b, self.hit, at)
        if self.positions:
            array, before = self.positions
            to = b.gep(array, [b.sub(k, before)])
            _squeezed(self.target, b, "int64", mask, _counted(b, b.add(self.first, at)), to)
        for kind, source, out in self.pairs:
            values = _loaded(b, b.gep(source, [at]))
            _squeezed(self.target, b, kind, mask, values, b.gep(out, [k]))
        b.store(b.add(k, _count(b, mask, STEP)), self.k)

    def each(self, at: Any, bits: Any, ones: Any) -> None:
        """One selected element after the other."""
        b = self.b
        b.store(bits, self.mask)
        with cgutils.for_range(b, ones):
            mask, k = b.load(self.mask), b.load(self.k)
            b.store(b.and_(mask, b.sub(mask, ir.Constant(I64, 1))), self.mask)
            i = b.add(at, b.cttz(mask, ir.Constant(I1, 0)))
            if self.positions:
                array, before = self.positions
                b.store(b.add(self.first, i), b.gep(array, [b.sub(k, before)]))
            for _, source, out in self.pairs:
                b.store(b.load(b.gep(source, [i])), b.gep(out, [k]))
            b.store(b.add(k, ir.Constant(I64, 1)), self.k)


def _array(target: Any, b: Any, kind: Any, value: Any) -> tuple[Any, Any]:
    """An array's address and length."""
    array = target.make_array(kind)(target, b, value)
    return array.data, array.nitems


def _squeeze(step: int, arrays: int, placed: bool) -> Any:
    """squeeze(hit, first, k, x, out, ...): x where hit, to out from k on; the next k.

    place(hit, first, k, positions, before, ...) also puts first + i of the hits to positions, from
    k - before on.
    """
    head = 3 + 2 * placed

    def declare(kinds: Any) -> Any:
        names = [kind.dtype.name for kind in kinds[head::2]]

        def emit(target: Any, b: Any, signature: Any, v: Any) -> Any:
            given = [*_array(target, b, BYTES, v[0]), v[1], v[2]]
            if placed:
                given += [_array(target, b, kinds[3], v[3])[0], v[4]]
            given += [_array(target, b, kinds[i], v[i])[0] for i in range(head, len(kinds))]

            def build(inner: Any, *args: Any) -> Any:
                return Squeeze(target, inner, names, placed, args).run(step)

            name = f"{'place' if placed else 'squeeze'}{step}_{'_'.join(names)}"
            return called(b, named(target, name), given, build, I64)

        positions = (kinds[3], i64) if placed else ()
        return i64(BYTES, i64, i64, *positions, *kinds[head:]), emit

    names = ", ".join(f"a{i}" for i in range(head + 2 * arrays))
    scope: dict[str, Any] = {"declare": declare}
    exec(f"def declared(typing, {names}):\n    return declare(({names},))", scope)
    return intrinsic(scope["declared"])


@intrinsic
def _spread(typing: Any, hit: Any, source: Any, out: Any) -> Any:
    """spread(hit, source, out): source to the hits of out, in turn, and 0 elsewhere."""
    kind = source.dtype.name

    def emit(target: Any, b: Any, signature: Any, v: Any) -> Any:
        kinds = signature.args[1:]
        given = list(_array(target, b, BYTES, v[0]))
        given += [_array(target, b, *pair)[0] for pair in zip(kinds, v[1:], strict=True)]

        def build(inner: Any, *args: Any) -> None:
            _spread_body(target, inner, kind, *args)

        called(b, named(target, f"spread_{kind}"), given, build)
        return target.get_dummy_value()

    return types.void(BYTES, source, out), emit


def _spread_body(
    target: Any, b: Any, kind: str, hit: Any, count: Any, source: Any, out: Any
) -> None:
    k = cgutils.alloca_once_value(b, ir.Constant(I64, 0))
    with _steps(b, count) as at:
        mask = _mask(b, hit, at)
        apart = _apart(target, b, kind, mask, b.gep(source, [b.load(k)]))
        b.store(apart, b.bitcast(b.gep(out, [at]), apart.type.as_pointer()), align=1)
        b.store(b.add(b.load(k), _count(b, mask, STEP)), k)


@intrinsic
def _hits(typing: Any, hit: Any) -> Any:
    """hits(hit): how many bytes are not zero."""

    def emit(target: Any, b: Any, signature: Any, v: Any) -> Any:
        found = cgutils.alloca_once_value(b, ir.Constant(I64, 0))
        data, length = _array(target, b, BYTES, v[0])
        with _steps(b, length) as at:
            b.store(b.add(b.load(found), _count(b, _mask(b, data, at), STEP)), found)
        return b.load(found)

    return i64(BYTES), emit


spread: Any = _spread
hits: Any = _hits


def _apart(target: Any, b: Any, kind: str, mask: Any, read: Any) -> Any:
    """What an address and those after it hold, each at the next selected lane; zero elsewhere."""
    item, letters = KINDS[kind]
    lanes = ir.VectorType(item, STEP)
    apart = ir.Constant(lanes, [0] * STEP)
    if vectors(target):
        name = f"llvm.x86.avx512.mask.expand.v{STEP}{letters}"
        return _call(b, name, lanes, [_loaded(b, read), apart, mask])
    for lane in range(STEP):
        number = ir.Constant(I32, lane)
        chosen, value = b.extract_element(mask, number), b.load(read)
        apart = b.insert_element(apart, b.select(chosen, value, ir.Constant(item, 0)), number)
        read = b.gep(read, [b.zext(chosen, I64)])
    return apart


def _high(count: int) -> Any:
    """Whether any of so many bytes is above 127."""
    every = int.from_bytes(bytes([128] * 8), "little")
    words = ir.VectorType(I64, count // 8)

    def emit(context: Any, b: Any, v: Any) -> Any:
        read = b.load(_address(context, b, v[0], v[1], words), align=1)
        name = f"llvm.vector.reduce.or.v{count // 8}i64"
        found = b.and_(_call(b, name, I64, [read]), ir.Constant(I64, every))
        return b.icmp_unsigned("!=", found, ir.Constant(I64, 0))

    return _primitive(b1, (BYTES, i64), emit)


is_hit = _primitive(b1, (u8,), lambda c, b, v: b.icmp_unsigned("!=", v[0], ir.Constant(I8, 0)))
#: whether any of so many bytes is above 127
high16, high64 = _high(16), _high(64)

squeeze64_1: Any
#: squeeze64_2: two arrays, 64 elements looked at together
for _step in (16, 64):
    for _arrays in range(ARRAYS + 1):
        globals()[f"squeeze{_step}_{_arrays}"] = _squeeze(_step, _arrays, placed=False)
        globals()[f"place{_step}_{_arrays}"] = _squeeze(_step, _arrays, placed=True)
__all__ = [
    "high16", "high64", "hits", "is_hit", "spread",
    *(f"{name}{step}_{n}" for name in ("squeeze", "place") for step in (16, 64) for n in range(ARRAYS + 1)),
]  # fmt: skip
