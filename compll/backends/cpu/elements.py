"""What compiled kernels compute of single elements, in NumPy: for what is known before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compll.numerics import elementary, numbers
from compll.numerics.types import U8


def codes(x: Any, most: int) -> U8:
    """Truncated into 0 .. most; NaN becomes 0."""
    values: U8 = np.clip(np.nan_to_num(x, nan=0), 0, most).astype(np.uint8)
    return values


#: by instruction; float32 and int32 in and out
ELEMENTS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "abs": np.abs, "sqrt": np.sqrt, "floor": np.floor, "ceil": np.ceil, "round": np.rint,
    "floordiv": lambda a, b: np.floor(a / b) if _floats(a) else np.floor_divide(a, b),
    "mod": lambda a, b: a - b * np.floor(a / b) if _floats(a) else np.mod(a, b),
    "sign": lambda x: np.where(x < 0, -1, 1).astype(np.asarray(x).dtype),
    "min": lambda a, b: np.where(a < b, a, b), "max": lambda a, b: np.where(a > b, a, b),
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
    "isfinite": np.isfinite, "isnan": np.isnan, "isinf": np.isinf, "where": np.where,
    **{name: elementary.rounded(getattr(elementary.NUMPY, name)) for name in ("exp", "log", "log2")},
    "pow": elementary.rounded(elementary.NUMPY.power),
    "exponent": numbers.exponent, "exp2": numbers.exp2,
    "float_bits": numbers.float_bits, "from_float_bits": numbers.from_float_bits,
    "float16": lambda x: np.float32(np.float16(np.float32(x))),
    "bfloat16": lambda x: numbers.from_bfloat16(numbers.bfloat16_bits(x)),
    "bfloat16_up": numbers.bfloat16_up,
    "trit": lambda x: codes(x, 2).astype(np.int32),
}  # fmt: skip


def _floats(x: Any) -> bool:
    return np.asarray(x).dtype.kind == "f"
