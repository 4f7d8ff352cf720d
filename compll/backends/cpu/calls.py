"""Routines that mix elements, in a kernel's loop over pieces; products.py, rows.py and routines.py
have their bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from compll.backends.cpu import products, routines, rows
from compll.backends.cpu.apart import apart
from compll.backends.cpu.builder import at, c, loop
from compll.backends.cpu.call_memory import narrow
from compll.backends.cpu.sources import Source, evaluated, pieces
from compll.backends.cpu.storages import finite_or, item_bytes, load_as, stored_as
from compll.backends.cpu.walk_params import store_name
from compll.ir.module import Field
from compll.ir.tile import SCRATCH, Call, Kernel, Store, Walk, order


class Calls:
    """The routines of the kernel that `printer` (a Printer) builds.

    fused: calls of products whose elements a walk computes where it stores them, by the walk's id.
    """

    def __init__(self, printer: Any) -> None:
        self.printer = printer
        self.fused = fused(printer.kernel)
        self.late = {id(call) for call in self.fused.values()}

    def emit(self, call: Call) -> None:
        """Call the routine, unless a walk does so."""
        if id(call) in self.late:
            return
        self.know(call)
        with apart(self.printer, call.routine):
            ROUTINES[call.routine](self, call, [Source(self.printer, v) for v in call.views])

    def know(self, call: Call) -> None:
        """Load the numbers that the routine needs, before a function of its own begins."""
        sides = [m for m in (call.matrix, *(view.matrix for view in call.views)) if m is not None]
        numbers = [v for m in sides for v in (m.rows, m.cols, m.size)]
        lanes = [v for view in call.views for v in pieces(view.value)]
        for v in (*numbers, *lanes, *call.numbers):
            self.printer.value(v)

    def made(self, call: Call, number: int = 0) -> ir.Value:
        """Pointer to an array that the routine fills."""
        return self.printer.pointers[f"{SCRATCH} {call.made[number].name}"]

    def sides(self, call: Call) -> tuple[ir.Value, ir.Value]:
        """Rows and columns of the matrix that it makes."""
        assert call.matrix is not None
        return self.printer.value(call.matrix.rows), self.printer.value(call.matrix.cols)

    def product(self, call: Call, sources: list[Source]) -> None:
        p, out, (rows_of, cols) = self.printer, self.made(call), self.sides(call)
        b, first, second = p.b, p.room(0), p.room(1)
        a, other = sources
        if call.attr:
            put = lambda y, place, _: b.put(y, out, place)  # noqa: E731
            return self.by_rows(call, sources, b.mul(rows_of, cols), put)
        inner = p.value(call.views[0].matrix.cols)  # type: ignore[union-attr]
        if not narrow(call):
            right = self.solid(other, (inner, cols), second)
            down, across = (c(1), rows_of) if a.view.turned else (inner, c(1))
            left = self.as_stored(a, first)
            return products.blocked(b, left, down, across, rows_of, inner, right, cols, out)
        columns = int(call.views[1].matrix.cols.attr)  # type: ignore[union-attr]
        if a.view.turned:
            rounded = b.and_(b.add(a.rows, c(3)), c(-4))
            products.factor(b, other, rounded, columns, first)
            return products.across(b, a, first, columns, second, out)
        products.factor(b, other, a.cols, columns, first)
        return products.narrow(b, a, first, columns, out)

    def by_rows(
        self, call: Call, sources: list[Source], count: ir.Value, take: Callable[..., None]
    ) -> None:
        """A short product, whose rows are computed as wholes."""
        p, (rows_of, cols) = self.printer, self.sides(call)
        inner = p.value(call.views[0].matrix.cols)  # type: ignore[union-attr]
        a = self.solid(sources[0], (rows_of, inner), p.room(0))
        right = self.solid(sources[1], (inner, cols), p.room(1))
        products.by_rows(p.b, a, rows_of, inner, right, cols, count, take)

    def solid(self, source: Source, sides: tuple[ir.Value, ir.Value], room: ir.Value) -> ir.Value:
        """A matrix in memory, row by row."""
        if not source.view.turned:
            return self.as_stored(source, room)
        b = self.printer.b
        with loop(b, sides[0]) as i, loop(b, sides[1]) as j:
            b.put(source.inside(source.place(i, j)), room, b.add(b.mul(i, sides[1]), j))
        return room

    def as_stored(self, source: Source, room: ir.Value) -> ir.Value:
        """A matrix in memory, by columns if its view is turned."""
        b, view, f = self.printer.b, source.view, source.view.value.attr
        if view.value.op == "load" and isinstance(f, Field) and f.shape == SCRATCH:
            own = self.printer.pointers[f"{SCRATCH} {f.name}"]
            if not view.ends:
                return own
            filled = b.mul(source.valid, c(4))
            b.copy(room, own, filled)
            b.clear(at(b, room, filled), b.sub(b.mul(source.size, c(4)), filled))
            return room
        with loop(b, source.size) as k:
            b.put(source.inside(k), room, k)
        return room

    def orthonormal(self, call: Call, sources: list[Source]) -> None:
        p, (rows_of, cols) = self.printer, self.sides(call)
        routines.orthonormal(p.b, p.helpers, sources, rows_of, cols, p.room(0), self.made(call))

    def hadamard(self, call: Call, sources: list[Source]) -> None:
        p = self.printer
        routines.hadamard(p.b, p.helpers, sources[0], call.attr, self.made(call))

    def top_columns(self, call: Call, sources: list[Source]) -> None:
        p = self.printer
        rows.top_columns(p.b, sources[0], self.sides(call)[1], self.made(call), p.room(0))

    def place_columns(self, call: Call, sources: list[Source]) -> None:
        at_, x = sources
        rows.place_columns(self.printer.b, at_, x, *self.sides(call), self.made(call))

    def sum_by(self, call: Call, sources: list[Source]) -> None:
        p, size = self.printer, self.sides(call)[1]
        largest = p.value(call.numbers[0])
        index, x = sources
        routines.sum_by(p.b, index, x, largest, size, p.room(0), self.made(call))

    def chosen(self, call: Call, sources: list[Source]) -> None:
        p, most = self.printer, self.sides(call)[1]
        routines.chosen(p.b, p, sources[0], call.attr, most, self.made(call))

    def drawn(self, call: Call, sources: list[Source]) -> None:
        p = self.printer
        routines.drawn(p.b, p, p.value(call.numbers[0]), self.made(call))

    # walks over products

    def walk(self, walk: Walk) -> bool:
        """True if the walk is fused with a product. Builds both."""
        call = self.fused.get(id(walk))
        if call is None:
            return False
        p = self.printer
        for v in (v for s in walk.stores for v in pieces(s.value)):
            p.value(v)
        product = next(v for v in walk.values if v.attr is call.made[0])

        def take(y: ir.Value, place: ir.Value, count: int) -> None:
            b, known = p.b, {id(product): y}
            back = b.icmp_unsigned("!=", p.given["back"], p.given["back"].type(0))
            ready = [(s, evaluated(p, s.value, place, count, known)) for s in walk.stores]
            for s, value in ready:
                if s.back:
                    with b.if_then(back):
                        self.store(s, value, place, count)
                else:
                    self.store(s, value, place, count)

        self.know(call)
        with apart(p, call.routine):
            self.by_rows(call, [Source(p, v) for v in call.views], p.row["n"], take)
        return True

    def store(self, s: Store, value: ir.Value, place: ir.Value, count: int) -> None:
        """Store lanes from `place` on."""
        p, b = self.printer, self.printer.b
        storage = "float32" if s.field is None else s.field.storage
        to = at(b, p.pointers[store_name(s)], b.mul(place, c(item_bytes(s.field))))
        if s.target == "state":
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
        walks = [w for w in kernel.walks if any(v.attr is f for v in w.values)]
        seen = any(v.attr is f for s in others for view in s.views for v in order([view.value]))
        if len(walks) == 1 and not seen and simple(walks[0]):
            found[id(walks[0])] = call
    return found


def simple(walk: Walk) -> bool:
    """True if a walk only stores values made of the same elements of arrays."""
    stores = all(
        s.target in ("state", "gradient", SCRATCH) and not s.packed and not s.placed
        for s in walk.stores
    )
    lanes = [v for v in walk.values if v.level == "lane"]
    plain = not any(v.op in OTHERS for v in lanes)
    products = {
        id(v.attr)
        for v in lanes
        if v.op == "load" and isinstance(v.attr, Field) and v.attr.shape == SCRATCH
    }
    return (
        stores
        and plain
        and not (walk.folds or walk.compacts or walk.of or walk.matrix)
        and len(products) == 1
    )


#: instructions whose lanes are known only in a walk over tiles
OTHERS = ("draw", "position", "unpack", "selected", "spread", "at", "bucket", "lookup")
ROUTINES: dict[str, Callable[[Calls, Call, list[Source]], None]] = {
    "product": Calls.product, "orthonormal": Calls.orthonormal, "hadamard": Calls.hadamard,
    "top_columns": Calls.top_columns,
    "place_columns": Calls.place_columns, "sum_by": Calls.sum_by, "chosen": Calls.chosen,
    "drawn": Calls.drawn,
}  # fmt: skip
