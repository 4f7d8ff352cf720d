"""States as NumPy arrays: float32, or 16 bits a value.

[Note: 16-bit states] Everything is computed in float32. A 16-bit state is converted when it is
read, which is exact, and rounded to nearest even when it is written. It keeps its old value if the
new one, rounded, is not below HUGE. Arrays of float16 are NumPy's; those of bfloat16, which NumPy
lacks, are uint16 with the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.numerics import bits
from compll.numerics.numbers import F32


def read(held: NDArray[Any]) -> F32:
    """The float32 values of a state. For a float32 state this is the array itself."""
    if held.dtype == np.uint16:
        result: F32 = bits.of_bfloat16(held.astype(np.int32))
        return result
    return held.astype(np.float32, copy=False)


def stored(values: F32, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Values as an array of that type stores them; values that are too large become infinite."""
    if dtype == np.uint16:
        result: NDArray[Any] = bits.bfloat16_bits(values).astype(np.uint16)
        return result
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False)


def keep(held: NDArray[Any], value: Any) -> None:
    """Store a state's new value. Elements whose new value is NaN, or not below HUGE, keep their old
    one."""
    rounded = read(stored(np.asarray(value, np.float32), held.dtype))
    held[:] = stored(np.where(np.abs(rounded) < bits.HUGE, rounded, read(held)), held.dtype)
