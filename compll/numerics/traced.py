"""Numbers of programs that are being printed: a backend's instructions with Python's operators.

Printers use them to turn the Python code of exp, log and powers into instructions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from compll.numerics.elementary import Functions, functions


def _operator(op: str) -> Any:
    return lambda a, b: a.made(op, a, b)


def _turned(op: str) -> Any:
    return lambda a, b: a.made(op, b, a)


class Number:
    """A float64 or a truth. emit(op, *args): the value of an instruction, from its name, Numbers
    and constants."""

    def __init__(self, emit: Callable[..., Any], value: Any) -> None:
        self.emit, self.value = emit, value

    def made(self, op: str, *args: Any) -> Number:
        """The result of an instruction."""
        return Number(self.emit, self.emit(op, *args))

    def __neg__(self) -> Number:
        return self.made("neg", self)

    __add__, __sub__, __rsub__ = _operator("add"), _operator("sub"), _turned("sub")
    __mul__, __truediv__, __rtruediv__ = _operator("mul"), _operator("div"), _turned("div")
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __and__, __or__ = _operator("and"), _operator("or")
    __hash__ = None  # type: ignore[assignment]


class Primitives(ABC):
    """A printer's versions of the operations in elementary.py."""

    @abstractmethod
    def emit(self, op: str, *args: Any) -> Any:
        """An instruction of Numbers and constants."""

    @abstractmethod
    def split(self, v: Number) -> tuple[Number, Number]: ...

    @abstractmethod
    def power_of_two(self, k: Number) -> Number: ...

    def number(self, value: Any) -> Number:
        """A value with Python's operators."""
        return Number(self.emit, value)

    def row(self, op: str) -> Callable[..., Number]:
        """A function that emits an instruction."""
        return lambda *args: self.number(self.emit(op, *args))

    def elementary(self) -> Functions:
        """exp, log, log2 and power."""
        where, nearest, floor, magnitude = map(self.row, ("where", "round", "floor", "abs"))
        return functions(where, self.split, self.power_of_two, nearest, floor, magnitude)
