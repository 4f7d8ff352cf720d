"""Operators on single elements: the reference backend's functions of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compll.numerics.bits import MEANINGS

#: those that NumPy has
MEANING: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
    "floor": np.floor, "ceil": np.ceil, "round": np.rint, "sqrt": np.sqrt,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or,
    "not": np.logical_not, "where": np.where,
    **{name: meaning.of for name, meaning in MEANINGS.items()},
}  # fmt: skip
