"""Where a codec's arrays live: what `Codec` needs to know of NumPy, and of device memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compll.errors import PayloadError, UsageError


class Arrays(Protocol):
    """Makes and checks the arrays of one kind of memory."""

    #: whether reading a value waits for nothing
    host: bool

    def vector(self, x: Any, name: str) -> Any:
        """x as a flat view. Raises UsageError when it is no contiguous gradient."""

    def payload(self, raw: Any, name: str) -> Any:
        """A payload as a flat uint8 array. Raises PayloadError."""

    def empty(self, count: int, dtype: str) -> Any:
        """An array with any content."""

    def zeros(self, count: int, dtype: str) -> Any:
        """An array of zeros."""


class HostArrays:
    """NumPy arrays."""

    host = True

    def vector(self, x: Any, name: str) -> NDArray[np.float32]:
        """x as float32 [n]. Raises UsageError."""
        if not isinstance(x, np.ndarray) or x.dtype != np.float32 or not x.flags.c_contiguous:
            kind = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
            raise UsageError(f"{name}: a contiguous float32 array is needed, not {kind}")
        return x.reshape(-1)

    def payload(self, raw: Any, name: str) -> NDArray[np.uint8]:
        """bytes or a uint8 vector. Raises PayloadError."""
        data = np.ascontiguousarray(np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else raw)
        if data.dtype != np.uint8 or data.ndim != 1:
            raise PayloadError(
                f"{name}: a payload is a uint8 vector, not {data.dtype} {data.shape}"
            )
        return data

    def empty(self, count: int, dtype: str) -> NDArray[Any]:
        """Uninitialized."""
        return np.empty(count, dtype)

    def zeros(self, count: int, dtype: str) -> NDArray[Any]:
        """Zeros."""
        return np.zeros(count, dtype)
