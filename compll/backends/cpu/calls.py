"""Routines that mix elements, in a kernel's loop over pieces; products.py, rows.py and routines.py
have their bodies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from llvmlite import ir

from compll.backends.cpu import products, routines, rows
from compll.backends.cpu.builder import at, loop
from compll.backends.cpu.interface import narrow
from compll.backends.cpu.printer import Printer
from compll.backends.cpu.sources import Source, evaluated, values_of_piece
from compll.backends.cpu.storages import finite_or, item_bytes, load_as, stored_as
from compll.backends.cpu.types import c
from compll.ir.tile import ELEMENTS, Call, Extents, Kernel, Store, Walk, order
from compll.passes.arrays import OWN


def emit(printer: Printer, call: Call) -> None:
    """Call the routine, as a function of its own."""
    know(printer, call)
    with printer.apart(call.routine) as p:
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
    b, out, first, second = p.b, made(p, call), p.room(0), p.room(1)
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
    a = solid(p, sources[0], (rows_of, inner), p.room(0))
    right = solid(p, sources[1], (inner, cols), p.room(1))
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
        own = p.pointers[view.value.attr]
        if not view.ends:
            return own
        filled = b.mul(source.valid, c(4))
        b.copy(room, own, filled)
        b.clear(at(b, room, filled), b.sub(b.mul(source.size, c(4)), filled))
        return room
    with loop(b, source.size) as k:
        b.put(source.inside(k), room, k)
    return room


def orthonormal(p: Printer, call: Call, sources: list[Source]) -> None:
    rows_of, cols = sides_of(p, call.matrix)
    routines.orthonormal(p.b, sources, rows_of, cols, p.room(0), made(p, call))


def hadamard(p: Printer, call: Call, sources: list[Source]) -> None:
    routines.hadamard(p.b, sources[0], call.attr, made(p, call))


def top_columns(p: Printer, call: Call, sources: list[Source]) -> None:
    rows.top_columns(p.b, sources[0], sides_of(p, call.matrix)[1], made(p, call), p.room(0))


def place_columns(p: Printer, call: Call, sources: list[Source]) -> None:
    at_, x = sources
    rows.place_columns(p.b, at_, x, *sides_of(p, call.matrix), made(p, call))


def sum_by(p: Printer, call: Call, sources: list[Source]) -> None:
    (index, x), size = sources, sides_of(p, call.matrix)[1]
    routines.sum_by(p.b, index, x, p.value(call.numbers[0]), size, p.room(0), made(p, call))


def chosen(p: Printer, call: Call, sources: list[Source]) -> None:
    most = sides_of(p, call.matrix)[1]
    routines.chosen(p, sources[0], call.attr, most, made(p, call))


def drawn(p: Printer, call: Call, sources: list[Source]) -> None:
    routines.drawn(p, p.value(call.numbers[0]), made(p, call))


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
    with printer.apart(call.routine) as p:

        def take(y: ir.Value, place: ir.Value, count: int) -> None:
            b, known = p.b, {id(of_product): y}
            back = b.icmp_unsigned("!=", p.given["back"], p.given["back"].type(0))
            ready = [(s, evaluated(p, s.value, place, count, known)) for s in walk.stores]
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


def fused(kernel: Kernel) -> dict[int, Call]:
    """Short products whose elements only one walk needs, by that walk's id."""
    found = {}
    for call in [
        s for s in kernel.steps if isinstance(s, Call) and s.routine == "product" and s.attr
    ]:
        (f,) = call.made
        others = [s for s in kernel.steps if isinstance(s, Call)]
        walks = [w for w in kernel.walks if any(v.attr == f for v in w.values)]
        seen = any(v.attr == f for s in others for view in s.views for v in order([view.value]))
        if len(walks) == 1 and not seen and simple(walks[0]):
            found[id(walks[0])] = call
    return found


def simple(walk: Walk) -> bool:
    """True if a walk only stores values made of the same elements of arrays."""
    stores = all(
        s.array.role in ("state", "gradient", "scratch") and not s.packed and s.place is None
        for s in walk.stores
    )
    lanes = [v for v in walk.values if v.level == "lane"]
    plain = not any(v.op in OWN for v in lanes)
    products = {v.attr for v in lanes if v.op == "load" and v.attr.role == "scratch"}
    alone = not (walk.folds or walk.compacts) and walk.domain == ELEMENTS
    return stores and plain and alone and len(products) == 1
