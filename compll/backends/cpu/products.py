"""Products of matrices as LLVM functions, in the order of [Note: order of matrix products].

A matrix that products read is an array, or the input of feedback, x * scale + residual * decay,
whose elements are computed where they are needed: PowerSGD reads it three times a step, and to make an
array of it costs more than the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import F32, F64, I32, SIZES, Builder, Variable, at, c, loop, number
from compll.backends.cpu.storages import finite_or, load_as, stored_as

#: lanes of float64 together, columns of a product together
WIDE, TOGETHER = 8, 4
#: rows that take turns in `rows`, elements between those at least, and columns in a turn
TURNS, APART, PART = 8, 4096, 256


def every(b: Builder, value: Any, lanes: int) -> Any:
    """A value in all lanes; lanes 0: itself."""
    return b.splat(value, lanes) if lanes else value


class Source:
    """A matrix's elements: of an array, or where `storage` is that of a residual, of feedback."""

    def __init__(
        self, b: Builder, storage: str, x: Any, scale: Any, residual: Any, decay: Any
    ) -> None:
        self.b, self.storage, self.x, self.residual = b, storage, x, residual
        self.scale, self.decay = scale, decay

    def load(self, index: Any, lanes: int) -> Any:
        """Elements from `index` on, float32; 0 lanes: one."""
        b = self.b
        found = b.get(self.x, F32, index, lanes)
        if self.storage == "":
            return found
        place = at(b, self.residual, b.mul(index, c(2 if self.storage == "bfloat16" else 4)))
        held = b.fmul(load_as(b, place, self.storage, lanes), every(b, self.decay, lanes))
        return b.fadd(b.fmul(found, every(b, self.scale, lanes)), held)


def wide(b: Builder, x: Any, lanes: int) -> Any:
    """float32 as float64."""
    return b.fpext(x, ir.VectorType(F64, lanes) if lanes else F64)


def transposed(b: Builder, rows: list[Any]) -> list[Any]:
    """The columns of as many rows as they have lanes."""
    count = len(rows)
    h = 1
    while h < count:
        low = [lane if not lane & h else count + lane - h for lane in range(count)]
        high = [lane + h if not lane & h else count + lane for lane in range(count)]
        for k in (k for k in range(count) if not k & h):
            one, other = rows[k], rows[k + h]
            rows[k], rows[k + h] = (
                b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, count), order))
                for order in (low, high)
            )
        h *= 2
    return rows


def by_columns(b: Builder, width: Any, body: Callable[[Any, int], None]) -> None:
    """body(column, how many) for an even number of columns, four at a time, then two."""
    fours = b.and_(width, c(-TOGETHER))
    for start, stop, count in ((c(0), fours, TOGETHER), (fours, width, 2)):
        with loop(b, stop, count, start) as column:
            body(column, count)


def product(storage: str) -> Any:
    """out [width, rows] = transpose(matrix @ right), float32 of sums in float64.

    right: float64 [inner, width], width even; rows come in eights.
    """

    def body(
        b: Builder, x: Any, scale: Any, residual: Any, decay: Any, rows: Any, inner: Any,
        right: Any, width: Any, out: Any,
    ) -> None:  # fmt: skip
        source = Source(b, storage, x, scale, residual, decay)
        whole = b.and_(inner, c(-WIDE))

        def add(sums: list[Any], y: Any, j: Any, column: Any) -> None:
            first = b.add(b.mul(j, width), column)
            for k, held in enumerate(sums):
                z = every(b, b.get(right, F64, b.add(first, c(k))), WIDE)
                held.set(b.intrinsic("fmuladd", y, z, held.get()))

        def block(i: Any, column: Any, count: int) -> None:
            nothing = ir.Constant(ir.VectorType(F64, WIDE), None)
            sums = [Variable(b, nothing) for _ in range(count)]
            starts = [b.mul(b.add(i, c(k)), inner) for k in range(WIDE)]
            with loop(b, whole, WIDE) as j:
                given = [source.load(b.add(start, j), WIDE) for start in starts]
                for k, y in enumerate(transposed(b, given)):
                    add(sums, wide(b, y, WIDE), b.add(j, c(k)), column)
            with loop(b, inner, 1, whole) as j:
                y = ir.Constant(ir.VectorType(F32, WIDE), None)
                for k, start in enumerate(starts):
                    one = source.load(b.add(start, j), 0)
                    y = b.insert_element(y, one, number(I32, k))
                add(sums, wide(b, y, WIDE), j, column)
            for k, held in enumerate(sums):
                place = b.add(b.mul(b.add(column, c(k)), rows), i)
                b.put(b.fptrunc(held.get(), ir.VectorType(F32, WIDE)), out, place)

        with loop(b, rows, WIDE) as i:
            by_columns(b, width, lambda column, count: block(i, column, count))

    return body


def across(storage: str) -> Any:
    """total [width, inner] += transpose(right) @ matrix, in float64.

    right: float64 [rows, width], width even; rows come in fours.
    """

    def body(
        b: Builder, x: Any, scale: Any, residual: Any, decay: Any, rows: Any, inner: Any,
        right: Any, width: Any, total: Any,
    ) -> None:  # fmt: skip
        source = Source(b, storage, x, scale, residual, decay)
        whole = b.and_(inner, c(-WIDE))

        def block(i: Any, column: Any, count: int) -> None:
            factors = [
                [b.get(right, F64, b.add(b.mul(b.add(i, c(r)), width), b.add(column, c(k))))
                 for r in range(TOGETHER)]
                for k in range(count)
            ]  # fmt: skip
            starts = [b.mul(b.add(i, c(r)), inner) for r in range(TOGETHER)]
            for first, stop, lanes in ((c(0), whole, WIDE), (whole, inner, 0)):
                ys = [[every(b, y, lanes) for y in some] for some in factors]
                with loop(b, stop, max(1, lanes), first) as j:
                    given = [wide(b, source.load(b.add(s, j), lanes), lanes) for s in starts]
                    for k, some in enumerate(ys):
                        place = b.add(b.mul(b.add(column, c(k)), inner), j)
                        sums = b.get(total, F64, place, lanes)
                        for x_of, y in zip(given, some, strict=True):
                            sums = b.intrinsic("fmuladd", x_of, y, sums)
                        b.put(sums, total, place)

        with loop(b, rows, TOGETHER) as i:
            by_columns(b, width, lambda column, count: block(i, column, count))

    return body


def rows(number_kind: str, effect: str) -> Any:
    """The elements of a @ b, by rows, sums in the type of both: to out (set), or added there (add).

    effect "float32", "bfloat16": a residual of this storage keeps what they leave of out * scale +
    residual, and where `write`, out becomes them. count: elements of out, which may end earlier.
    """
    kind = F32 if number_kind == "float32" else F64
    lanes = 64 // SIZES[kind]

    def body(
        b: Builder, a: Any, count_of_rows: Any, inner: Any, right: Any, cols: Any, out: Any,
        count: Any, scale: Any, residual: Any, decay: Any, write: Any,
    ) -> None:  # fmt: skip
        def leave(y: Any, place: Any, vector: int) -> None:
            source = Source(b, effect, out, scale, residual, decay)
            value = b.fsub(source.load(place, vector), y)
            held = at(b, residual, b.mul(place, c(2 if effect == "bfloat16" else 4)))
            before = load_as(b, held, effect, vector)
            b.store(stored_as(b, finite_or(b, value, before, effect), effect), held, align=1)
            with b.if_then(write):
                b.put(y, out, place)

        def end(sums: Any, place: Any, vector: int) -> None:
            y = (
                sums
                if kind == F32
                else b.fptrunc(sums, ir.VectorType(F32, vector) if vector else F32)
            )
            if effect == "set":
                b.put(y, out, place)
            elif effect == "add":
                b.put(b.fadd(b.get(out, F32, place, vector), y), out, place)
            else:
                leave(y, place, vector)

        def strip(i: Any, column: Any, place: Any, vectors: int) -> None:
            """Several vectors of columns; a single one where there are none."""
            vector = lanes if vectors else 0
            shape = ir.VectorType(kind, vector) if vectors else kind
            nothing = ir.Constant(shape, None if vectors else 0.0)
            sums = [Variable(b, nothing) for _ in range(max(1, vectors))]
            start = b.mul(i, inner)
            with loop(b, inner) as j:
                y = every(b, b.get(a, kind, b.add(start, j)), vector)
                first = b.add(b.mul(j, cols), column)
                for k, held in enumerate(sums):
                    z = b.get(right, kind, b.add(first, c(lanes * k)), vector)
                    held.set(b.fadd(held.get(), b.fmul(y, z)))
            for k, held in enumerate(sums):
                end(held.get(), b.add(place, c(lanes * k)), vector)

        def part(i: Any, column: Any, place: Any, some: Any) -> None:
            done = c(0)
            for vectors in (TOGETHER, 1, 0):
                step = max(1, vectors * lanes)
                stop = b.add(done, b.and_(b.sub(some, done), c(-step)))
                with loop(b, stop, step, done) as j:
                    strip(i, b.add(column, j), b.add(place, j), vectors)
                done = stop

        # Rows that are far apart in memory take turns at each part of b, which stays in the cache;
        # besides, memory takes several streams a third faster than one.
        least = b.udiv(c(APART), cols)
        apart = b.select(b.icmp_signed(">", least, c(1)), least, c(1))
        together = b.mul(apart, c(TURNS))
        groups = b.udiv(b.add(count_of_rows, b.sub(together, c(1))), together)
        with loop(b, groups) as group, loop(b, apart) as near:
            first = b.add(b.mul(group, together), near)
            with loop(b, cols, PART) as column, loop(b, c(TURNS)) as turn:
                i = b.add(first, b.mul(turn, apart))
                place = b.add(b.mul(i, cols), column)
                some = least_of(b, c(PART), b.sub(cols, column), b.sub(count, place))
                with b.if_then(b.icmp_signed(">", some, c(0))):
                    part(i, column, place, some)

    return body


def least_of(b: Builder, *values: Any) -> Any:
    """The smallest of int64 values."""
    found, *others = values
    for other in others:
        found = b.select(b.icmp_signed("<", other, found), other, found)
    return found
