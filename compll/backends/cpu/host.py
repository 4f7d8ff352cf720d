"""Work that kernels ask the host for: singular values and vectors, by LAPACK."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from compll.backends.cpu.interface import HOST
from compll.numerics import spectra


class Host:
    """A function that a kernel calls. An exception in it is raised after the kernel has
    returned."""

    def __init__(self) -> None:
        self.function = HOST(self.spectrum)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value
        self.error: BaseException | None = None

    def spectrum(self, m: int, rows: int, cols: int, *made: int) -> None:
        """Left vectors, values and right vectors of a matrix."""
        try:
            found = spectra.spectrum(array(m, rows * cols).reshape(rows, cols))
            for address, values in zip(made, found, strict=True):
                array(address, values.size)[:] = values.reshape(-1)
        except BaseException as error:
            self.error = error

    def raise_found(self) -> None:
        """Raise the exception of the last call, if any."""
        if self.error is not None:
            raise self.error


def array(address: int, count: int) -> Any:
    """float32 [count] at an address."""
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (count,))
