"""What kernels are called with. Apart from their printer, which a process with cached objects
never imports."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from compll.ir.tile import Kernel
from compll.numerics.numbers import MEAN_LANES

#: elements that arrays of selected ones have besides them: whole vectors are written
SLACK = 64
_START = ctypes.c_char * 0
ADDRESS, WORD = ctypes.c_void_p, ctypes.c_int64
#: what a kernel is given before its states, and of what type
GIVEN: dict[str, Any] = {
    "x": ADDRESS, "table": ADDRESS, "rows": WORD, "payload": ADDRESS, "at": ADDRESS,
    "used": ADDRESS, "statics": ADDRESS, "seed": WORD, "step": WORD, "scale": ctypes.c_float,
    "back": ctypes.c_int8, "data": ADDRESS, "data_at": ADDRESS, "data_used": ADDRESS,
    "scratch": ADDRESS, "room": WORD, "bad": ADDRESS, "workers": ctypes.c_float, "host": ADDRESS,
}  # fmt: skip


def sum_bytes(size: int) -> int:
    """Of sums of each of MEAN_LANES tiles, and counts; of one index more, for what is not counted."""
    return (8 * MEAN_LANES + 4) * (size + 1)


def signature(kernel: Kernel) -> list[Any]:
    """The types of a kernel's arguments, for ctypes."""
    return [*GIVEN.values(), *[ADDRESS] * (len(kernel.states) + 2 * len(kernel.added))]


#: what a kernel asks the host for: a matrix, its rows and columns, and where three arrays go
HOST = ctypes.CFUNCTYPE(None, ADDRESS, WORD, WORD, ADDRESS, ADDRESS, ADDRESS)


def passed(value: Any) -> Any:
    """An array's address, or a number."""
    if not isinstance(value, np.ndarray):
        return value
    if value.flags.writeable:
        return ctypes.addressof(_START.from_buffer(value.data))
    return value.ctypes.data  # of any array, and several times as slow
