"""Routines that mix elements, in a kernel's loop over pieces; products.py has those of matrices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu import products
from compll.backends.cpu.builder import (
    F32,
    F64,
    I1,
    I32,
    I64,
    PTR,
    VOID,
    Builder,
    Variable,
    at,
    c,
    loop,
    number,
    repeat_while,
    routine,
)
from compll.backends.cpu.instructions import finite_or, item_bytes, load_as, stored_as
from compll.backends.cpu.interface import narrow
from compll.backends.cpu.lanes import halved
from compll.backends.cpu.printer import Printer, Source, evaluated, values_of_piece, wide
from compll.backends.cpu.products import WIDE, least_of
from compll.ir.tile import Call, Extents, Store, Walk
from compll.numerics import draws
from compll.numerics.bits import clamp
from compll.numerics.matrices import TINY
from compll.numerics.numbers import LANES, sum_units

# ---- routines -----------------------------------------------------------------------------------
# Transforms, orthonormal columns, sums by index and draws, bit for bit as in
# numerics/matrices.py.

#: elements of a transform that the first-level cache holds, as a power of two
CACHED = 12
#: lanes that are combined at all distances within a register, as a power of two
NEAR = 4
ROOT = 0.70710678118654752  # square root of a half


@routine(F64, PTR, PTR, I64)
def _dot(b: Builder, x: ir.Value, y: ir.Value, count: ir.Value) -> ir.Value:
    """A dot product in the order of [Note: orthonormal]; count: a multiple of LANES."""

    def products(first: ir.Value) -> list[ir.Value]:
        places = [b.add(first, c(k)) for k in range(0, LANES, WIDE)]
        return [b.fmul(b.get(x, F64, p, WIDE), b.get(y, F64, p, WIDE)) for p in places]

    sums = [Variable(b, value) for value in products(c(0))]
    with loop(b, count, LANES, c(LANES)) as k:
        for held, value in zip(sums, products(k), strict=True):
            held.set(b.fadd(held.get(), value))
    return halved(b, [held.get() for held in sums], WIDE)


@routine(I1, PTR, I64, I64)
def _direction(b: Builder, basis: ir.Value, place: ir.Value, size: ir.Value) -> ir.Value:
    """Make row `place` of basis [_, size] orthogonal to the rows before it, and of length one. True
    if a direction is left; see [Note: orthonormal]."""
    row = at(b, basis, b.mul(b.mul(place, size), c(8)))
    before = b.intrinsic("sqrt", _dot(b, row, row, size))
    with loop(b, c(2)), loop(b, place) as k:
        other = at(b, basis, b.mul(b.mul(k, size), c(8)))
        factor = b.splat(_dot(b, other, row, size), WIDE)
        with loop(b, size, WIDE) as i:
            part = b.fmul(factor, b.get(other, F64, i, WIDE))
            b.put(b.fsub(b.get(row, F64, i, WIDE), part), row, i)
    after = b.intrinsic("sqrt", _dot(b, row, row, size))
    least = b.fmul(before, number(F64, TINY))
    little = b.fcmp_ordered("<=", after, least)
    finite = b.fcmp_ordered("<", least, number(F64, float("inf")))
    left = b.not_(b.and_(little, finite))
    with b.if_then(left), loop(b, size, WIDE) as i:
        b.put(b.fdiv(b.get(row, F64, i, WIDE), b.splat(after, WIDE)), row, i)
    return left


def orthonormal_columns(
    b: Builder,
    sources: list[Source],
    rows: ir.Value,
    cols: ir.Value,
    basis: ir.Value,
    out: ir.Value,
) -> None:
    """out [rows, cols]: orthonormal columns that span those of the first source, or else of the
    second.

    basis: float64 [cols, rows to the next multiple of LANES].
    """
    size = b.and_(b.add(rows, c(LANES - 1)), c(-LANES))
    b.clear(basis, b.mul(b.mul(cols, size), c(8)))

    with loop(b, cols) as k:
        column = at(b, basis, b.mul(b.mul(k, size), c(8)))
        independent = Variable(b, number(I1, 0))
        for source in sources:
            with b.if_then(b.not_(independent.get())):
                with loop(b, rows) as i:
                    b.put(wide(b, source.inside(source.place(i, k))), column, i)
                independent.set(_direction(b, basis, k, size))
        with b.if_then(b.not_(independent.get())):
            b.clear(column, b.mul(size, c(8)))
        with loop(b, rows) as i:
            b.put(b.fptrunc(b.get(column, F64, i), F32), out, b.add(b.mul(i, cols), k))


def _within(b: Builder, x: ir.Value, count: int) -> ir.Value:
    """Combine lanes of a vector at the distances 1, 2, 4, ..."""
    indices = ir.VectorType(I32, count)
    h = 1
    while h < count:
        swapped = ir.Constant(indices, [lane ^ h for lane in range(count)])
        other = b.shuffle_vector(x, x, swapped)
        total, difference = b.fadd(x, other), b.fsub(other, x)
        order = [lane + count * bool(lane & h) for lane in range(count)]
        x = b.shuffle_vector(total, difference, ir.Constant(indices, order))
        h *= 2
    return x


def _butterfly(b: Builder, run: ir.Value, h: ir.Value, count: int, lanes: int) -> None:
    """Combine elements at distance h, of two parts of h elements; and at distance 2 h, of four."""
    with loop(b, h, lanes) as j:
        places = [b.add(j, b.mul(h, c(k))) for k in range(count)]
        x = [b.get(run, F32, place, lanes) for place in places]
        distance = 1
        while distance < count:
            for k in (k for k in range(count) if not k & distance):
                low, other = x[k], x[k + distance]
                x[k], x[k + distance] = b.fadd(low, other), b.fsub(low, other)
            distance *= 2
        for place, value in zip(places, x, strict=True):
            b.put(value, run, place)


@routine(VOID, PTR, I64, I64)
def _walks(b: Builder, run: ir.Value, low: ir.Value, high: ir.Value) -> None:
    """Combine distances 2**low to 2**(high - 1) of a run of 2**high elements, two in each walk."""
    size = b.shl(c(1), high)
    twos = b.and_(b.sub(high, low), c(-2))
    with loop(b, twos, 2) as k:
        h = b.shl(c(1), b.add(low, k))
        four = b.shl(h, c(2))
        with loop(b, b.udiv(size, four)) as i:
            _butterfly(b, at(b, run, b.mul(b.mul(i, four), c(4))), h, 4, 16)
    with b.if_then(b.icmp_signed("!=", twos, b.sub(high, low))):
        _butterfly(b, run, b.lshr(size, c(1)), 2, 16)


@routine(VOID, PTR, I64)
def _few(b: Builder, run: ir.Value, size: ir.Value) -> None:
    """Combine all distances of a run that is shorter than a vector."""
    h = Variable(b, c(1))
    with repeat_while(b, lambda: b.icmp_signed("<", h.get(), size)):
        with loop(b, b.lshr(size, c(1))) as j:
            low = b.and_(j, b.sub(h.get(), c(1)))
            place = b.add(b.shl(b.sub(j, low), c(1)), low)
            other = b.add(place, h.get())
            x, y = b.get(run, F32, place), b.get(run, F32, other)
            b.put(b.fadd(x, y), run, place)
            b.put(b.fsub(x, y), run, other)
        h.set(b.shl(h.get(), c(1)))


def transformed(b: Builder, x: Source, block: int, out: ir.Value) -> None:
    """out = the transform of runs of `block` elements, then of ever smaller powers of two."""
    done, bits = Variable(b, c(0)), Variable(b, c(block.bit_length() - 1))
    n = x.size
    with repeat_while(b, lambda: b.icmp_signed("<", done.get(), n)):
        whole = b.lshr(b.sub(n, done.get()), bits.get())
        with b.if_then(b.icmp_signed(">", whole, c(0))):
            end = b.add(done.get(), b.shl(whole, bits.get()))
            _runs(b, x, out, done.get(), end, bits.get())
            done.set(end)
        bits.set(b.sub(bits.get(), c(1)))


def _factor(b: Builder, bits: ir.Value) -> ir.Value:
    """2**(-bits / 2)."""
    halved_ = b.trunc(b.sub(c(127), b.lshr(bits, c(1))), I32)
    power = b.bitcast(b.shl(halved_, number(I32, 23)), F32)
    odd = b.icmp_signed("==", b.and_(bits, c(1)), c(1))
    return b.fmul(b.select(odd, number(F32, ROOT), number(F32, 1.0)), power)


def _runs(
    b: Builder, x: Source, out: ir.Value, start: ir.Value, end: ir.Value, bits: ir.Value
) -> None:
    """Transform runs of 2**bits elements each.

    A part that the first-level cache holds goes through all of its distances at once.
    """
    size, factor = b.shl(c(1), bits), _factor(b, bits)
    near = least_of(b, c(CACHED), bits)
    with b.if_else(b.icmp_signed("<", bits, c(NEAR))) as (small, large):
        with small, loop(b, end, 1, start) as first:
            b.put(x.load(first, 0), out, first)
        with large, loop(b, end, size, start) as run:
            with loop(b, b.add(run, size), b.shl(c(1), near), run) as part:
                with loop(b, b.shl(c(1), near), 16) as i:
                    place = b.add(part, i)
                    b.put(_within(b, x.load(place, 16), 16), out, place)
                _walks(b, at(b, out, b.mul(part, c(4))), c(NEAR), near)
            _walks(b, at(b, out, b.mul(run, c(4))), near, bits)
            with loop(b, size, 16) as i:
                place = b.add(run, i)
                b.put(b.fmul(b.get(out, F32, place, 16), b.splat(factor, 16)), out, place)
    with b.if_then(b.icmp_signed("<", bits, c(NEAR))), loop(b, end, size, start) as run:
        _few(b, at(b, out, b.mul(run, c(4))), size)
        with loop(b, size) as i:
            place = b.add(run, i)
            b.put(b.fmul(b.get(out, F32, place), factor), out, place)


def sums_by_index(
    b: Builder,
    index: Source,
    x: Source,
    largest: ir.Value,
    size: ir.Value,
    sums: ir.Value,
    out: ir.Value,
) -> None:
    """out [size]: sums of the elements of each index; indices are clipped. See [Note: sums by
    index].

    sums: int64 [size]; largest: the largest magnitude, float64.
    """
    given = ins.numbers(b, b.fptrunc(largest, F32), x.size)
    up, down = (unit.value for unit in sum_units(*given))
    finite = b.fcmp_ordered("==", up, up)
    b.clear(sums, b.mul(size, c(8)))
    most = b.trunc(b.sub(size, c(1)), I32)
    with b.if_then(finite), loop(b, x.size) as i:
        place = index.load(i, 0)
        place = b.select(b.icmp_signed("<", place, number(I32, 0)), number(I32, 0), place)
        place = b.sext(b.select(b.icmp_signed(">", place, most), most, place), I64)
        units = b.intrinsic("rint", b.fmul(wide(b, x.load(i, 0)), up))
        b.put(b.add(b.get(sums, I64, place), b.fptosi(units, I64)), sums, place)
    with loop(b, size) as k:
        total = b.sitofp(b.get(sums, I64, k), F64)
        b.put(b.fptrunc(b.fmul(total, down), F32), out, k)


def drawn_positions(printer: Printer, count: ir.Value, out: ir.Value) -> None:
    """out, int32: `count` positions, the same on all ranks; see draws.shared_positions."""
    b, n = printer.b, printer.row["n"]
    keys = printer.draw_keys(c(0), draws.DRAWN, printer.row["first"])
    begin = ins.traced(draws.circle_start)(b, keys, n)

    def position(j: ir.Value) -> ir.Value:
        return ins.traced(draws.on_circle)(b, keys, begin, n, count, j)

    bounds = [Variable(b, c(0)), Variable(b, count)]
    with repeat_while(b, lambda: b.icmp_signed("<", bounds[0].get(), bounds[1].get())):
        middle = b.lshr(b.add(bounds[0].get(), bounds[1].get()), c(1))
        beyond = b.icmp_signed(">=", position(middle), n)
        bounds[1].set(b.select(beyond, middle, bounds[1].get()))
        bounds[0].set(b.select(beyond, bounds[0].get(), b.add(middle, c(1))))
    turned = bounds[0].get()
    for start, stop, shift, to in (
        (turned, count, n, c(0)),
        (c(0), turned, c(0), b.sub(count, turned)),
    ):
        with loop(b, stop, 1, start) as j:
            place = b.add(b.sub(j, start), to)
            b.put(b.trunc(b.sub(position(j), shift), I32), out, place)


def chosen_columns(
    printer: Printer, chances: Source, draw: int, most: ir.Value, out: ir.Value
) -> None:
    """out [most], int32: positions by systematic sampling, then -1; see matrices.chosen."""
    b, first = printer.b, printer.row["first"]
    keys = printer.draw_keys(printer.given["seed"], draw, b.lshr(first, c(32)))
    u = wide(b, ins.traced(draws.uniform_of)(b, first, keys))
    with loop(b, most) as j:
        b.put(number(I32, -1), out, j)
    line, taken = Variable(b, number(F64, 0.0)), Variable(b, c(0))
    last = Variable(b, b.intrinsic("ceil", b.fsub(number(F64, 0.0), u)))
    with loop(b, chances.size) as i:
        p = ins.traced(clamp)(b, wide(b, chances.load(i, 0)), 0.0, 1.0)
        line.set(b.fadd(line.get(), p))
        step = b.intrinsic("ceil", b.fsub(line.get(), u))
        hit = b.and_(b.fcmp_ordered(">", step, last.get()), b.icmp_signed("<", taken.get(), most))
        with b.if_then(hit):
            b.put(b.trunc(i, I32), out, taken.get())
            taken.set(b.add(taken.get(), c(1)))
        last.set(step)


# ---- calls --------------------------------------------------------------------------------------


def emit(printer: Printer, call: Call) -> None:
    """Call the routine, as a function of its own."""
    know(printer, call)
    with printer.outlined(call.routine) as p:
        ROUTINES[call.routine](p, call, [Source(p, v) for v in call.views])


def know(printer: Printer, call: Call) -> None:
    """Load the numbers that the routine needs, before a function of its own begins."""
    sides = [m for m in (call.matrix, *(view.matrix for view in call.views)) if m is not None]
    numbers = [v for m in sides for v in (m.rows, m.cols, m.size)]
    lanes = [v for view in call.views for v in values_of_piece(view.value)]
    for v in (*numbers, *lanes, *call.numbers):
        printer.value(v)


def made(p: Printer, call: Call) -> ir.Value:
    """Pointer to the array that the routine fills."""
    return p.pointers[call.made[0]]


def sides_of(p: Printer, matrix: Extents | None) -> tuple[ir.Value, ir.Value]:
    """Rows and columns of a matrix."""
    assert matrix is not None
    return p.value(matrix.rows), p.value(matrix.cols)


def product(p: Printer, call: Call, sources: list[Source]) -> None:
    b, out, first, second = p.b, made(p, call), p.workspace(0), p.workspace(1)
    (rows_of, cols), (_, inner) = sides_of(p, call.matrix), sides_of(p, call.views[0].matrix)
    a, other = sources
    if call.attr:
        put = lambda y, place, _: b.put(y, out, place)  # noqa: E731
        by_rows(p, call, sources, b.mul(rows_of, cols), put)
    elif narrow(call):
        columns = int(call.views[1].matrix.cols.attr)  # type: ignore[union-attr]
        if a.view.turned:
            rounded = b.and_(b.add(a.rows, c(3)), c(-4))
            products.factor(b, other, rounded, columns, first)
            products.across(b, a, first, columns, second, out)
        else:
            products.factor(b, other, a.cols, columns, first)
            products.narrow(b, a, first, columns, out)
    else:
        right = solid(p, other, (inner, cols), second)
        down, across = (c(1), rows_of) if a.view.turned else (inner, c(1))
        left = as_stored(p, a, first)
        total = at(b, second, b.mul(b.mul(inner, cols), c(4)))
        products.blocked(b, left, down, across, rows_of, inner, right, cols, total, out)


def by_rows(
    p: Printer, call: Call, sources: list[Source], count: ir.Value, take: Callable[..., None]
) -> None:
    """A short product, whose rows are computed as wholes."""
    (rows_of, cols), (_, inner) = sides_of(p, call.matrix), sides_of(p, call.views[0].matrix)
    a = solid(p, sources[0], (rows_of, inner), p.workspace(0))
    right = solid(p, sources[1], (inner, cols), p.workspace(1))
    products.by_rows(p.b, a, rows_of, inner, right, cols, count, take)


def solid(p: Printer, source: Source, sides: tuple[ir.Value, ir.Value], room: ir.Value) -> ir.Value:
    """A matrix in memory, row by row."""
    if not source.view.turned:
        return as_stored(p, source, room)
    with loop(p.b, sides[0]) as i, loop(p.b, sides[1]) as j:
        p.b.put(source.inside(source.place(i, j)), room, p.b.add(p.b.mul(i, sides[1]), j))
    return room


def as_stored(p: Printer, source: Source, room: ir.Value) -> ir.Value:
    """A matrix in memory, by columns if its view is turned."""
    b, view = p.b, source.view
    if view.value.op == "load" and view.value.attr.role == "scratch":
        memory = p.pointers[view.value.attr]
        if not view.ends:
            return memory
        filled = b.mul(source.valid, c(4))
        b.copy(room, memory, filled)
        b.clear(at(b, room, filled), b.sub(b.mul(source.size, c(4)), filled))
        return room
    with loop(b, source.size) as k:
        b.put(source.inside(k), room, k)
    return room


def orthonormal(p: Printer, call: Call, sources: list[Source]) -> None:
    rows_of, cols = sides_of(p, call.matrix)
    orthonormal_columns(p.b, sources, rows_of, cols, p.workspace(0), made(p, call))


def hadamard(p: Printer, call: Call, sources: list[Source]) -> None:
    transformed(p.b, sources[0], call.attr, made(p, call))


def top_columns(p: Printer, call: Call, sources: list[Source]) -> None:
    products.top_columns(
        p.b, sources[0], sides_of(p, call.matrix)[1], made(p, call), p.workspace(0)
    )


def place_columns(p: Printer, call: Call, sources: list[Source]) -> None:
    at_, x = sources
    products.place_columns(p.b, at_, x, *sides_of(p, call.matrix), made(p, call))


def sum_by(p: Printer, call: Call, sources: list[Source]) -> None:
    (index, x), size = sources, sides_of(p, call.matrix)[1]
    sums_by_index(p.b, index, x, p.value(call.numbers[0]), size, p.workspace(0), made(p, call))


def chosen(p: Printer, call: Call, sources: list[Source]) -> None:
    most = sides_of(p, call.matrix)[1]
    chosen_columns(p, sources[0], call.attr, most, made(p, call))


def drawn(p: Printer, call: Call, sources: list[Source]) -> None:
    drawn_positions(p, p.value(call.numbers[0]), made(p, call))


ROUTINES: dict[str, Callable[[Printer, Call, list[Source]], None]] = {
    "product": product, "orthonormal": orthonormal, "hadamard": hadamard, "sum_by": sum_by,
    "top_columns": top_columns, "place_columns": place_columns, "chosen": chosen, "drawn": drawn,
}  # fmt: skip


# walks over products


def walk(printer: Printer, walk: Walk, call: Call) -> None:
    """A walk that computes the elements of a product where it stores them."""
    for v in (v for s in walk.stores for v in values_of_piece(s.value)):
        printer.value(v)
    of_product = next(v for v in walk.values if v.attr == call.made[0])
    know(printer, call)
    with printer.outlined(call.routine) as p:

        def take(y: ir.Value, place: ir.Value, count: int) -> None:
            b, values = p.b, {of_product: y}
            back = b.icmp_unsigned("!=", p.given["back"], p.given["back"].type(0))
            ready = [(s, evaluated(p, s.value, place, count, values)) for s in walk.stores]
            for s, value in ready:
                with b.if_then(back) if s.back else nullcontext():
                    store(p, s, value, place, count)

        by_rows(p, call, [Source(p, v) for v in call.views], p.row["n"], take)


def store(p: Printer, s: Store, value: ir.Value, place: ir.Value, count: int) -> None:
    """Store lanes from `place` on."""
    b, storage = p.b, s.array.storage.name
    to = at(b, p.pointers[s.array], b.mul(place, c(item_bytes(s.array))))
    if s.array.role == "state":
        value = finite_or(b, value, load_as(b, to, storage, count), storage)
    b.store(stored_as(b, value, storage), to, align=1)
