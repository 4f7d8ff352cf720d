"""Operators on single elements: the reference backend's functions of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compll.backends.reference import fields
from compll.numerics import elementary, numbers


def _where(c: Any, a: Any, b: Any) -> Any:
    return np.where(c, a, b)


def _floordiv(a: Any, b: Any) -> Any:
    return np.floor(a / b) if np.asarray(a).dtype.kind == "f" else np.floor_divide(a, b)


def _float16(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def _bfloat16(x: Any) -> Any:
    value = np.asarray(x, np.float32)
    return numbers.from_bfloat16(numbers.bfloat16_bits(np.atleast_1d(value))).reshape(value.shape)


def _bfloat16_up(x: Any) -> Any:
    value = np.asarray(x, np.float32)
    return numbers.bfloat16_up(np.atleast_1d(value)).reshape(value.shape)


def _float8_e4m3(x: Any) -> Any:
    value = np.asarray(x, np.float32)
    return numbers.from_float8(numbers.float8_codes(value))


MEANING: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": elementary.rounded(elementary.NUMPY.power),
    "floordiv": _floordiv,
    "neg": np.negative,
    "abs": np.abs,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "sqrt": np.sqrt,
    "exp": elementary.rounded(elementary.NUMPY.exp),
    "log": elementary.rounded(elementary.NUMPY.log),
    "log2": elementary.rounded(elementary.NUMPY.log2),
    "trit": lambda x: fields.code(x, 2),
    "exponent": numbers.exponent,
    "float_bits": numbers.float_bits,
    "from_float_bits": numbers.from_float_bits,
    "exp2": numbers.exp2,
    "min": lambda a, b: np.where(a < b, a, b),
    "max": lambda a, b: np.where(a > b, a, b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "isfinite": np.isfinite,
    "where": _where,
    "float16": _float16,
    "bfloat16": _bfloat16,
    "bfloat16_up": _bfloat16_up,
    "float8_e4m3": _float8_e4m3,
    "float32": lambda x: np.float32(x),
}
