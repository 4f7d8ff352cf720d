"""Routines (see compll/routines/language.py) as Python's functions, with NumPy's vectors.

An array is a bytearray and the place of its first byte there. A number is an int of Python, which
wraps around as one of 64 bits does; a vector is an array of NumPy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.ir.storage import Storage
from compll.numerics.numbers import U8
from compll.routines.language import Routine
from compll.routines.streams import CHUNK, STREAMS

#: sizes of elements, in bytes, and their names in NumPy
ELEMENTS = {"u8": (1, "u1"), "u16": (2, "<u2"), "i32": (4, "<i4"), "i64": (8, "<i8")}
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "left": "<<", "right": ">>", "quotient": "//", "and": "&",
    "or": "|", "xor": "^", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
#: instructions whose results wrap around
WRAPPING = ("add", "sub", "mul", "left", "unsigned_right")
#: texts of numbers, and of vectors
TEXTS = {
    **{op: f"{{}} {text} {{}}" for op, text in INFIX.items()},
    "not": "not {}", "unsigned_right": "({} & WORD) >> {}",
    "where": "{1} if {0} else {2}", "likely": "{}", "unlikely": "{}",
    "popcount": "({} & WORD).bit_count()",
    "ctz": "(~{0} & ({0} - 1) & WORD).bit_count()",
    "swapped": "int.from_bytes(({} & WORD).to_bytes(8, 'little'), 'big', signed=True)",
    "running": "np.cumsum({0}, dtype={0}.dtype)",
}  # fmt: skip
#: texts of vectors' instructions whose results are numbers
REDUCED = {
    "any_bits": "int(np.bitwise_or.reduce({}))", "sum_of": "int({}.sum())", "last": "int({}[-1])",
    "mask": "int.from_bytes(np.packbits({}, bitorder='little').tobytes(), 'little')",
}  # fmt: skip


class Value(NamedTuple):
    """The name of a number, or of a vector of some lanes."""

    text: str
    lanes: int = 0

    def __str__(self) -> str:
        return self.text


class Base(NamedTuple):
    """The names of an array's bytearray and of its first byte's place."""

    data: str
    at: str


def wrapped(x: object, bits: int = 64) -> str:
    """An integer as one of so many bits, with a sign."""
    half = 1 << bits - 1
    return f"(({x}) + {half} & {2 * half - 1}) - {half}"


def _dtype(kind: str) -> str:
    return "i4" if kind == "i32" else "i8"


def _place(array: Base, element: str, index: Value) -> str:
    """The place of an element's first byte."""
    return f"{array.at} + {index} * {ELEMENTS[element][0]}"


class Function:
    """A function under construction: a line for each instruction."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth, self.names = 1, 0
        self.called: dict[str, Callable[..., Any]] = {}

    def add(self, text: str) -> None:
        """Add a line."""
        self.lines.append("  " * self.depth + text)

    def named(self, text: object, lanes: int = 0) -> Value:
        """A new name for what an expression gives."""
        self.names += 1
        self.add(f"v{self.names} = {text}")
        return Value(f"v{self.names}", lanes)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """`head:`, and lines within it."""
        self.add(f"{head}:")
        self.depth += 1
        yield
        self.add("pass")
        self.depth -= 1

    def const(self, kind: str, number: float, like: object) -> Value:
        """A constant, which fits all lanes."""
        return Value(f"({number})")

    def emit(self, op: str, kind: str, *args: Any) -> Any:
        """The name of an instruction's value."""
        if op in MEMORY:
            return MEMORY[op](self, *args)
        if op == "splat":
            return self.named(f"np.full({args[1]}, {args[0]}, '{_dtype(kind)}')", args[1])
        lanes = max(a.lanes for a in args)
        if op == "convert":
            return self.converted(args[0], kind)
        if op in REDUCED:
            return self.named(REDUCED[op].format(*args))
        text = TEXTS[op].format(*args)
        return self.named(text if lanes or op not in WRAPPING else wrapped(text), lanes)

    def converted(self, x: Value, kind: str) -> Value:
        """A number of another integer kind."""
        if x.lanes:
            return self.named(f"{x}.astype('{_dtype(kind)}')", x.lanes)
        return self.named(wrapped(f"int({x})", 32 if kind == "i32" else 64))

    # variables and branches: see Machine in routines/language.py

    def variable(self, kind: str, value: Value) -> Value:
        """A new variable."""
        return self.named(value, value.lanes)

    def get(self, variable: Value) -> Value:
        """A copy of its present value."""
        return self.named(variable, variable.lanes)

    def set(self, variable: Value, value: Value) -> None:
        """Assign a value."""
        self.add(f"{variable} = {value}")

    def branch(self, condition: Value, then: Callable[[], None], other: Callable[[], None]) -> None:
        """A branch, by a condition."""
        with self.block(f"if {condition}"):
            then()
        with self.block("else"):
            other()

    def repeat(self, condition: Callable[[], Value], body: Callable[[], None]) -> None:
        """A body as long as a condition holds."""
        with self.block("while True"):
            self.add(f"if not {condition()}: break")
            body()

    def loop(self, start: Value, stop: Value, step: int, body: Callable[[Value], None]) -> None:
        """A body for start, start + step, ... below stop."""
        index = self.named(start)
        with self.block(f"for {index} in range({start}, {stop}, {step})"):
            body(index)

    def call(self, routine: Routine, args: list[Any], constants: dict[str, Any]) -> Value:
        """A call of a routine."""
        given = ", ".join(", ".join(a) if isinstance(a, Base) else a.text for a in args)
        name = "_".join([routine.name, *map(str, constants.values())])
        self.called[name] = function(routine, **constants)
        return self.named(f"{name}({given})")

    # arrays

    def load(self, array: Base, element: str, index: Value, lanes: int) -> Value:
        """An element as an int, or a vector of elements of at least 32 bits."""
        (size, name), place = ELEMENTS[element], _place(array, element, index)
        if lanes:
            wide = "i8" if size == 8 else "i4"
            held = f"np.frombuffer({array.data}, '{name}', {lanes}, {place})"
            return self.named(f"{held}.astype('{wide}')", lanes)
        if size == 1:
            return self.named(f"{array.data}[{place}]")
        return self.named(f"{element}.unpack_from({array.data}, {place})[0]")

    def store(self, array: Base, element: str, index: Value, value: Value) -> None:
        """Store a number or a vector, truncated."""
        (size, name), place = ELEMENTS[element], self.named(_place(array, element, index))
        if value.lanes:
            end = f"{place} + {size * value.lanes}"
            self.add(f"{array.data}[{place}:{end}] = {value}.astype('{name}').tobytes()")
        elif size == 1:
            self.add(f"{array.data}[{place}] = {value} & 255")
        else:
            text = f"{value} & 65535" if size == 2 else wrapped(value, 8 * size)
            self.add(f"{element}.pack_into({array.data}, {place}, {text})")

    def moved(self, array: Base, element: str, index: Value) -> Base:
        """The array from an element on."""
        return Base(array.data, self.named(_place(array, element, index)).text)

    def local(self, element: str, count: int) -> Base:
        """A new array."""
        return Base(self.named(f"bytearray({count * ELEMENTS[element][0]})").text, "0")

    def clear(self, array: Base, element: str, count: Value) -> None:
        """Set elements to 0."""
        size = self.named(f"{count} * {ELEMENTS[element][0]}")
        self.add(f"{array.data}[{array.at}:{array.at} + {size}] = bytes({size})")

    def copy(self, array: Base, element: str, count: Value, source: Base) -> None:
        """Copy elements."""
        size = self.named(f"{count} * {ELEMENTS[element][0]}")
        data = f"{source.data}[{source.at}:{source.at} + {size}]"
        self.add(f"{array.data}[{array.at}:{array.at} + {size}] = {data}")


MEMORY: dict[str, Callable[..., Any]] = {
    "load": Function.load, "store": Function.store, "moved": Function.moved,
    "local": Function.local, "clear": Function.clear, "copy": Function.copy,
}  # fmt: skip

#: what the text of functions uses
NAMES = {
    "np": np, "WORD": (1 << 64) - 1,
    "u16": struct.Struct("<H"), "i32": struct.Struct("<i"), "i64": struct.Struct("<q"),
}  # fmt: skip


@cache
def function(routine: Routine, **constants: int) -> Callable[..., Any]:
    """A routine as a function, of two arguments for each array: its bytearray, and a place."""
    made, arrays = Function(), [kind != "int" for kind in routine.kinds]
    given = [
        Base(name, f"{name}_at") if array else Value(name)
        for name, array in zip(routine.params, arrays, strict=True)
    ]
    result = routine.printed(made, given, constants)
    params = ", ".join(", ".join(each) if isinstance(each, Base) else each.text for each in given)
    text = "\n".join([f"def made({params}):", *made.lines, f"  return {result}"])
    scope: dict[str, Any] = NAMES | made.called
    exec(compile(text, routine.name, "exec"), scope)
    of: Callable[..., Any] = scope["made"]
    return of


#: bytes behind an array: routines write vectors and words past its end
ROOM = 4 * CHUNK + 8


def stored(storage: Storage, values: NDArray[Any], n: int, most: int) -> U8:
    """The bytes, at most `most`, of a field of varying length. n: see routines/streams.py."""
    out, (given, at) = bytearray(most + ROOM), _array(storage, values)
    end = function(STREAMS[storage.name].store)(given, at, len(values), n, out, 0)
    return np.frombuffer(out, np.uint8, end)


def loaded(storage: Storage, data: U8, count: int, n: int) -> NDArray[Any] | None:
    """Inverse of `stored`; None if the bytes are not so many values."""
    values, at = _array(storage, np.zeros(count))
    load = function(STREAMS[storage.name].load)
    good = load(bytearray(data), 0, len(data), count, n, values, at)
    return np.frombuffer(values, _item(storage), count, at) if good else None


def _array(storage: Storage, values: NDArray[Any]) -> tuple[bytearray, int]:
    """Values as an array behind a -1, and its place."""
    return bytearray(b"\xff" * 4 + values.astype(_item(storage)).tobytes() + bytes(ROOM)), 4


def _item(storage: Storage) -> str:
    return "<i4" if storage.positions else "u1"
