"""Memory that kernels need besides their arguments: scratch arrays, and memory of routines."""

from __future__ import annotations

from collections.abc import Iterator

from compll.backends.cpu.interface import SLACK
from compll.ir.matrices import NARROW, check_rooms, extents
from compll.ir.tile import Call, Kernel, View, flat
from compll.numerics.numbers import LANES

#: arrays that a routine may need for its own use
ROOMS = 2


def narrow(call: Call) -> bool:
    """True if a product has few columns, so that each row of its first matrix is read once."""
    cols = call.views[1].matrix.cols if call.views[1].matrix else None
    return cols is not None and cols.op == "const" and cols.attr <= NARROW


def count(kernel: Kernel) -> int:
    """The number of a kernel's arrays, of equal size: scratch arrays, then those of routines."""
    calls = any(isinstance(step, Call) for step in flat(kernel.steps))
    return len(kernel.scratch) + (ROOMS if calls else 0)


def room(kernel: Kernel, n: int) -> int:
    """The most bytes that one of a kernel's arrays takes for a piece of n elements.

    Raises UsageError if a matrix is too large, or does not hold the elements.
    """
    check_rooms(kernel.rooms, n)
    item = 1 if all(f.packed for f in kernel.scratch) else 4  # bytes of an element, at most
    most = [item * (n + kernel.tile + SLACK)]
    most += [4 * (elements(f.dims, n) + kernel.tile + SLACK) for f in kernel.own if f.dims]
    most += [size for s in kernel.steps if isinstance(s, Call) for size in wanted(s, n)]
    return max(most) + 63 & -64


def elements(dims: tuple[object, ...], n: int) -> int:
    """Elements of a matrix."""
    rows, cols = extents(dims, n)  # type: ignore[arg-type]
    return rows * cols


def wanted(call: Call, n: int) -> Iterator[int]:
    """Bytes of each array that a routine needs for its own use."""
    sides = [sides_of(view, n) for view in call.views]
    if call.routine == "product":
        (rows, inner), (_, cols) = sides
        yield 8 * (rows + 4 if narrow(call) else rows * inner)  # kept below
        yield 8 * (max(rows + 4, inner) * (cols + 1)) + 8 * inner * (cols + 1)
    if call.routine == "orthonormal":
        rows, cols = sides[0]
        yield 8 * cols * (rows + LANES)
    if call.routine == "top_columns":
        yield 4 * (sides[0][1] + 2 * SLACK)
    if call.routine == "sum_by" and call.matrix is not None:
        yield 8 * elements(call.matrix.dims, n)


def sides_of(view: View, n: int) -> tuple[int, int]:
    """Rows and columns of a view."""
    return (1, n) if view.matrix is None else extents(view.matrix.dims, n)
