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
    "scratch": ADDRESS, "room": WORD, "bad": ADDRESS,
}  # fmt: skip


def sum_bytes(size: int) -> int:
    """Of sums of each of MEAN_LANES tiles, and counts; of one index more, for what is not counted."""
    return (8 * MEAN_LANES + 4) * (size + 1)


def signature(kernel: Kernel) -> list[Any]:
    """The types of a kernel's arguments, for ctypes."""
    return [*GIVEN.values(), *[ADDRESS] * len(kernel.states)]


#: the parameters of routines over whole arrays, a letter each: see LETTERS
ROUTINES = {
    "product": "pfpfiipip", "across": "pfpfiipip", "rows": "piipipifpfb", "direction": "piip",
    "hadamard": "ppiif", "sum_by": "ppidpi", "gather": "pfpfpipp", "extreme": "piip", "top_columns": "piiipp", "scatter": "pipip",
}  # fmt: skip
#: an address, a whole number, float32, float64, a truth
LETTERS = {
    "p": ADDRESS, "i": WORD, "f": ctypes.c_float, "d": ctypes.c_double, "b": ctypes.c_bool,
}  # fmt: skip


def passed(value: Any) -> Any:
    """An array's address, or a number."""
    if not isinstance(value, np.ndarray):
        return value
    if value.flags.writeable:
        return ctypes.addressof(_START.from_buffer(value.data))
    return value.ctypes.data  # of any array, and several times as slow
