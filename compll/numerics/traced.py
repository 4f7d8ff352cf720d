"""Functions of numbers, for NumPy to compute and for printers to write as instructions.

A function written with Python's operators and the operations below takes NumPy's numbers or
arrays, which it computes; or Numbers of a program that is being printed, each operation of which
is an instruction. So the meaning of an operator is written once (bits.py, draws.py, bits.py).

Numbers have a kind: f32, f64, i32, i64 or bool. Both sides of an operation have the same kind, or
one is a constant of Python. Integers wrap around; // and % of a program's Numbers take those that
are not negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

DTYPES: dict[str, Any] = {
    "f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "bool": np.bool_,
}  # fmt: skip
KINDS = {np.dtype(dtype): kind for kind, dtype in DTYPES.items()}
#: the integer kind with the bits of a float kind, and the float kind of an integer kind's bits
SAME_BITS = {"f32": "i32", "f64": "i64", "i32": "f32", "i64": "f64"}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class Machine(Protocol):
    """A printer's instructions."""

    def const(self, kind: str, number: float, like: Any) -> Any:
        """A constant, in as many lanes as the value `like`."""

    def emit(self, op: str, kind: str, *args: Any) -> Any:
        """The value, of this kind, of an instruction."""


class Number:
    """A number of a program that is being printed."""

    def __init__(self, machine: Machine, value: Any, kind: str) -> None:
        self.machine, self.value, self.kind = machine, value, kind

    def emit(self, op: str, kind: str, *args: Any) -> Number:
        """The result of an instruction. Constants have the kind of another argument that is no
        truth, else f64."""
        numbers = [a for a in args if isinstance(a, Number)]
        shared_kind = next((a.kind for a in numbers if a.kind != "bool"), "f64")
        values = [
            a.value if isinstance(a, Number) else self.machine.const(shared_kind, a, self.value)
            for a in args
        ]
        kind = kind or shared_kind
        return Number(self.machine, self.machine.emit(op, kind, *values), kind)

    def __neg__(self) -> Number:
        return self.emit("neg", self.kind, self)

    def __invert__(self) -> Number:
        return self.emit("not", "bool", self)

    def __bool__(self) -> bool:
        raise TypeError("a number's truth is known in the kernel only: use &, |, ~ and where")


def _infix(op: str, *, turned: bool = False) -> Callable[[Number, Any], Number]:
    def method(self: Number, other: Any) -> Number:
        kind = "bool" if op in COMPARISONS else self.kind
        return self.emit(op, kind, *((other, self) if turned else (self, other)))

    return method


for _name, _op in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "and": "and", "or": "or",
    "xor": "xor", "lshift": "left", "rshift": "right", "floordiv": "quotient", "mod": "remainder",
    **{op: op for op in COMPARISONS},
}.items():  # fmt: skip
    setattr(Number, f"__{_name}__", _infix(_op))
    if _op not in COMPARISONS:
        setattr(Number, f"__r{_name}__", _infix(_op, turned=True))


def _where(c: Any, a: Any, b: Any) -> Any:
    dtype = next((x.dtype for x in (a, b) if hasattr(x, "dtype")), None)
    return np.where(c, np.asarray(a, dtype), np.asarray(b, dtype))


def _unsigned(ufunc: Callable[..., Any]) -> Callable[..., Any]:
    """A function of integers of any sign, as if they were unsigned."""

    def call(a: Any, b: Any) -> Any:
        a = np.asarray(a)
        unsigned = {4: np.uint32, 8: np.uint64}[a.itemsize]
        return ufunc(a.view(unsigned), np.asarray(b, a.dtype).view(unsigned)).view(a.dtype)

    return call


#: what operations that Python lacks are in NumPy
_NUMPY: dict[str, Callable[..., Any]] = {
    "where": _where, "floor": np.floor, "ceil": np.ceil, "round": np.rint, "sqrt": np.sqrt,
    "magnitude": np.abs,
    "quotient": lambda a, b: (a - np.fmod(a, b)) // b, "remainder": np.fmod,
    "unsigned_right": _unsigned(np.right_shift),
    "unsigned_quotient": _unsigned(np.floor_divide),
}  # fmt: skip


def _operation(op: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        for a in args:
            if isinstance(a, Number):
                return a.emit(op, "", *args)
        return _NUMPY[op](*args)

    return call


where, floor, ceil, nearest, root = map(_operation, ("where", "floor", "ceil", "round", "sqrt"))
#: of floats
magnitude = _operation("magnitude")
#: of integers: towards zero, with the dividend's sign
quotient, remainder = map(_operation, ("quotient", "remainder"))
#: of integers, as if they were unsigned
unsigned_right, unsigned_quotient = map(_operation, ("unsigned_right", "unsigned_quotient"))


def kind_of(x: Any) -> str:
    """The kind of a number."""
    return x.kind if isinstance(x, Number) else KINDS[np.asarray(x).dtype]


def convert(x: Any, kind: str) -> Any:
    """x as another kind. A float that becomes an integer is truncated, and must fit."""
    if kind_of(x) == kind:
        return x
    if isinstance(x, Number):
        return x.emit("convert", kind, x)
    return np.asarray(x).astype(DTYPES[kind])


def bits(x: Any) -> Any:
    """The bits of a float as an integer, or the float with an integer's bits."""
    kind = SAME_BITS[kind_of(x)]
    return x.emit("bits", kind, x) if isinstance(x, Number) else np.asarray(x).view(DTYPES[kind])
