"""Arguments and scratch memory of kernels. A process with cached objects imports this, but not their
printer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from compll.ir.static import NARROW, check_matrices, extents
from compll.ir.tile import Call, Kernel, View, flat
from compll.numerics.matrices import CHUNK
from compll.numerics.numbers import LANES

#: spare elements of arrays of selected elements: whole vectors are written
SLACK = 64
#: routines that need one or two arrays for their own use
ROOMS = ("product", "orthonormal", "top_columns", "sum_by")
_START = ctypes.c_char * 0
ADDRESS, WORD = ctypes.c_void_p, ctypes.c_int64
#: arguments of a kernel before its states, and their types
GIVEN: dict[str, Any] = {
    "x": ADDRESS, "table": ADDRESS, "rows": WORD, "payload": ADDRESS, "at": ADDRESS,
    "used": ADDRESS, "statics": ADDRESS, "seed": WORD, "step": WORD, "scale": ctypes.c_float,
    "back": ctypes.c_int8, "data": ADDRESS, "data_at": ADDRESS, "data_used": ADDRESS,
    "scratch": ADDRESS, "array_bytes": WORD, "bad": ADDRESS, "workers": ctypes.c_float,
}  # fmt: skip


def signature(kernel: Kernel) -> list[Any]:
    """The types of a kernel's arguments, for ctypes."""
    return [*GIVEN.values(), *[ADDRESS] * (len(kernel.states) + 2 * len(kernel.sums))]


def passed(value: Any) -> Any:
    """An array's address, or a number."""
    if not isinstance(value, np.ndarray):
        return value
    if value.flags.writeable:
        return ctypes.addressof(_START.from_buffer(value.data))
    return value.ctypes.data  # takes any array, but is several times slower


def narrow(call: Call) -> bool:
    """True if a product has few columns, so that each row of its first matrix is read once."""
    cols = call.views[1].matrix.cols if call.views[1].matrix else None
    return cols is not None and cols.op == "const" and cols.attr <= NARROW


def array_count(kernel: Kernel) -> int:
    """The number of a kernel's arrays, of equal size: scratch arrays, then those of routines."""
    calls = any(isinstance(s, Call) and s.routine in ROOMS for s in flat(kernel.steps))
    return len(kernel.scratch) + (2 if calls else 0)


def array_bytes(kernel: Kernel, n: int) -> int:
    """The most bytes that one of a kernel's arrays takes for a piece of n elements.

    Raises UsageError if a matrix is too large, or does not hold the elements.
    """
    check_matrices(kernel.matrices, n)
    sizes = [n, *(elements(a.domain.dims, n) for a in kernel.scratch if a.domain.dims)]
    item = 1 if all(a.storage.packed for a in kernel.scratch) else 4  # bytes, at most
    most = [item * (size + kernel.tile + SLACK) for size in sizes]
    most += [size for s in flat(kernel.steps) if isinstance(s, Call) for size in wanted(s, n)]
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
        if narrow(call):
            yield 8 * (cols + 1) * max(inner + 4, 2 * rows)  # a factor, or sums
        else:
            yield 4 * inner * rows
            yield 4 * inner * cols + 8 * rows * cols * (inner > CHUNK)
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
