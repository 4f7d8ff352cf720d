"""Arrays of a codec's callers, checked and in the form that kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from compll.errors import UsageError
from compll.ir.rounds import Before
from compll.numerics.held import once_with, part
from compll.numerics.types import F32, I64, U8
from compll.runtime.arguments import Arguments
from compll.runtime.arrays import Arrays
from compll.runtime.batches import Incoming, State


class Decode(NamedTuple):
    """A call of a backend's decode: one payload per piece, or several if it merges."""

    table: I64
    at: I64
    used: Any
    add: bool


class Inputs:
    """The checks of one codec: `arrays` knows its memory, `arguments` its spec's sizes."""

    def __init__(self, name: str, arrays: Arrays, arguments: Arguments) -> None:
        self.name, self.arrays, self.arguments = name, arrays, arguments

    def states(self, state: State | None) -> State | None:
        """A caller's states; other types than mappings are refused later."""
        if self.arrays.host or not isinstance(cast(object, state), Mapping):
            return state
        return {name: self.arrays.raw(held, self.name) for name, held in (state or {}).items()}

    def used(self, used: I64) -> I64:
        """Payloads' lengths. They may be in host memory even if payloads are not."""
        if self.arrays.host or isinstance(cast(object, used), np.ndarray):
            return self.arguments.numbers(used, "used", 2 if np.ndim(used) == 2 else 1)
        return cast(I64, self.arrays.raw(used, self.name))

    def incoming(self, incoming: Incoming, table: I64, out: U8, at: I64) -> Incoming:
        """Payloads that an encode merges. Raises UsageError if they overlap its own payloads."""
        payload = self.arrays.payloads(incoming[0], self.name, "the incoming payload")
        raw = Incoming(payload, incoming[1], self.used(incoming[2]))
        there: int | None = self.arrays.address(payload) - self.arrays.address(out)
        if there is not None and not -len(payload) < there < len(out):
            there = None  # apart, wherever they are
        key = "incoming", len(payload), len(out), there

        def checked() -> Incoming:
            found = self.arguments.incoming(raw, table)
            if there is not None and self.arguments.overlap(table, at, found.at, there):
                raise UsageError(
                    f"{self.name}: out is written while the incoming payloads are read, and the "
                    "two have memory in common"
                )
            return found

        found = once_with(at, key, (table, raw.at, raw.used), checked)
        return Incoming(payload, found.at, found.used)

    def before(self, payloads: Before) -> Before:
        """Payloads of rounds."""
        what = "the payload of a round"
        return [(self.arrays.payloads(payload, self.name, what), at) for payload, at in payloads]

    def rounds(
        self, x: F32, table: I64, state: State | None, payloads: Before, count: int,
        *, write: bool = False,
    ) -> F32:  # fmt: skip
        """The gradient of a round, whose other arguments fit it."""
        x = self.arrays.vector(x, self.name, write=write)
        self.arguments.rounds(payloads, count, len(x), table)
        self.arguments.state(state, table)
        return x

    def decodes(
        self, payload: U8, table: I64, at: I64, used: I64, n: int, *, add: bool, merges: bool
    ) -> list[Decode]:
        """The calls of a decode into n elements; all are checked before any is made. For held
        numbers once: see [Note: held numbers]."""
        key = "decodes", n, len(payload), add, merges

        def checked() -> list[Decode]:
            return self._decodes(payload, table, at, used, n, add=add, merges=merges)

        return once_with(at, key, (table, used), checked)

    def _decodes(
        self, payload: U8, table: I64, at: I64, used: I64, n: int, *, add: bool, merges: bool
    ) -> list[Decode]:
        used = self.used(used)
        if np.ndim(at) != 2:
            return [self.decode(payload, table, at, used, n, add)]
        if used.shape != at.shape:
            raise UsageError(f"{self.name}: at is {at.shape}, and used {used.shape}")
        calls = [
            self.decode(payload, table, part(at, k), part(used, k), n, add or k > 0)
            for k in range(len(at))
        ]
        first = 0 if add else 1
        if len(calls) > first + 1 and merges:
            rest = slice(first, None)
            several = Decode(table, part(at, rest), part(used, rest), True)
            calls = [*calls[:first], several]
        return calls

    def decode(self, payload: U8, table: I64, at: I64, used: Any, n: int, add: bool) -> Decode:
        """The call that decodes a payload of each piece."""
        table, at = self.arguments.table(table, at, n, "out")
        self.arguments.lengths(payload, table, at, used)
        return Decode(table, at, used, add)
