"""Arguments of kernels. A process with cached objects imports this, but not their printer."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from compll.ir.tile import Kernel

#: spare elements of arrays of selected elements: whole vectors are written
SLACK = 64
_START = ctypes.c_char * 0
ADDRESS, WORD = ctypes.c_void_p, ctypes.c_int64
#: arguments of a kernel before its states, and their types
GIVEN: dict[str, Any] = {
    "x": ADDRESS, "table": ADDRESS, "rows": WORD, "payload": ADDRESS, "at": ADDRESS,
    "used": ADDRESS, "statics": ADDRESS, "seed": WORD, "step": WORD, "scale": ctypes.c_float,
    "back": ctypes.c_int8, "data": ADDRESS, "data_at": ADDRESS, "data_used": ADDRESS,
    "scratch": ADDRESS, "room": WORD, "bad": ADDRESS, "workers": ctypes.c_float,
}  # fmt: skip


def signature(kernel: Kernel) -> list[Any]:
    """The types of a kernel's arguments, for ctypes."""
    return [*GIVEN.values(), *[ADDRESS] * (len(kernel.states) + 2 * len(kernel.added))]


def passed(value: Any) -> Any:
    """An array's address, or a number."""
    if not isinstance(value, np.ndarray):
        return value
    if value.flags.writeable:
        return ctypes.addressof(_START.from_buffer(value.data))
    return value.ctypes.data  # takes any array, but is several times slower
