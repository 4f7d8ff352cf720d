"""A spec as it is written: its sections, parameters and declarations as data."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from compll.errors import Span
from compll.frontend.syntax import Syntax

Shape = Sequence[int]
#: sources of a parameter: sides of the matrix that has a tensor's first axis as rows
SIDES: dict[str, Callable[[Shape], int]] = {
    "rows": lambda shape: shape[0] if shape else 1,
    "columns": lambda shape: math.prod(shape[1:]),
}
ParamValue = int | float | bool | str
PARAM_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
ANY = "*"


def as_float(value: Any) -> float:
    """A number as a float; infinite if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def shown(value: object) -> str:
    """A value for people, short: Python refuses to spell integers of thousands of digits, and
    values that hold one another many times are endless."""
    if type(value) is int and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    short = repr if isinstance(value, float | bool | str) else reprlib.repr
    return short(value)[:100]


@dataclass(frozen=True)
class Param:
    """A parameter: its type, default and range (ends included)."""

    name: str
    type: str
    default: ParamValue
    span: Span
    low: float | None = None
    high: float | None = None
    choices: tuple[ParamValue, ...] = ()
    about: str = ""
    #: a key of SIDES: the side of a tensor's shape that is the value if none is given; or ""
    side: str = ""

    def check(self, value: object) -> str | None:
        """The reason why `value` is not allowed, or None."""
        wanted = PARAM_TYPES[self.type]
        exact = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
        if not exact and not (wanted is float and type(value) is int):
            return f"parameter {self.name!r} is {self.type}, not {shown(value)}"
        if self.choices and value not in self.choices:
            allowed = ", ".join(map(str, self.choices))
            return f"parameter {self.name!r} is one of {allowed}, not {shown(value)}"
        if isinstance(value, str):
            return None
        if isinstance(value, int) and wanted is int and abs(value) >= 2**53:
            return f"parameter {self.name!r} is an int below 2**53, not {shown(value)}"
        low = self.low if self.low is not None else float("-inf")
        high = self.high if self.high is not None else float("inf")
        if not low <= as_float(value) <= high:
            return f"parameter {self.name!r} is from {low:g} to {high:g}, not {shown(value)}"
        return None


def open_params(params: Iterable[Param], named: Collection[str]) -> tuple[Param, ...]:
    """Parameters that a shape may set: those that a caller has not named."""
    return tuple(p for p in params if p.side and p.name not in named)


def settled(open_: Iterable[Param], shape: Shape) -> Mapping[str, int]:
    """Values from a shape. A parameter that does not allow its value keeps the default."""
    values = {p.name: (p, SIDES[p.side](shape)) for p in open_}
    return {name: value for name, (p, value) in values.items() if p.check(value) is None}


@dataclass(frozen=True)
class Declared:
    """A declared tensor: a payload field or a state. `dim` is None for a scalar.

    second: the columns of a matrix, whose rows are `dim`. other: the declaration that takes its
    place if `condition`, of parameters, does not hold.
    """

    name: str
    base: str
    bits: Syntax | None
    dim: Syntax | None
    span: Span
    second: Syntax | None = None
    condition: Syntax | None = None
    other: Declared | None = None


@dataclass(frozen=True)
class Binding:
    """`name: expression`."""

    name: str
    value: Syntax
    span: Span


@dataclass(frozen=True)
class Chosen:
    """A section's choice: `value`, or with a condition of parameters `value` if it holds, else
    `other`.

    factor: for feedback, the residual's decay, or the share of a difference that the reference
    takes up; None for 1.
    """

    value: str
    span: Span
    condition: Syntax | None = None
    other: str = ""
    factor: Syntax | None = None


@dataclass(frozen=True)
class Spec:
    """A compressor as it is written."""

    path: str
    name: str
    about: str
    source: str
    params: tuple[Param, ...]
    group: Syntax | None
    state: tuple[Declared, ...]
    encode: tuple[Binding, ...]
    payload: tuple[Declared, ...]
    decode: tuple[Binding, ...]
    update: tuple[Binding, ...]
    owed: tuple[Binding, ...]
    feedback: Chosen
    merge: str
    unbiased: Chosen
    rounds: tuple[Binding, ...]
    when: Syntax | None
    spans: Mapping[str, Span]
    #: names whose definition could not be read (ANY: any name): their use is not another error
    broken: Set[str]
