"""Checks of a codec call's arguments, before any kernel runs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from compll.errors import PayloadError, UsageError
from compll.frontend.spec import Shape
from compll.ir import layout as lay
from compll.ir.expr import walk
from compll.ir.layout import Before, cuts, most_in, rounds
from compll.ir.module import Field, Module
from compll.ir.static import Number
from compll.numerics.numbers import F32, I64, U8
from compll.runtime.arrays import (
    INTS,
    Arrays,
    Memo,
    checked,
    checked_table,
    fault,
    hold,
    is_held,
    once,
    once_with,
    part,
)
from compll.runtime.batches import LENGTH, START, STATE, TENSOR, Incoming, State

#: the largest index of an element in specs that use indices, which are int32
LARGEST = 2**31 - 1
#: operators that order elements, whose numbers are int32
ORDERING = ("sample", "kth_largest", "quantiles")


def furthest(starts: I64, lengths: I64) -> int:
    """The largest end, start + length, computed with Python's integers: an int64 would wrap."""
    return int(max(map(operator.add, starts.tolist(), lengths.tolist())))


def _orders(module: Module) -> bool:
    """True if the module orders elements."""
    roots = [f.expr for f in module.fields if f.expr is not None]
    return any(e.op in ORDERING for e in walk(*roots, module.decode, *module.updates.values()))


class Arguments:
    """Checks of arguments for one module and its parameters; they raise UsageError or PayloadError.

    host: payloads and states are in host memory, as tables always are.
    """

    def __init__(self, module: Module, params: Mapping[str, Number], *, host: bool) -> None:
        self.module, self.params, self.name = module, params, module.name
        self.host = host
        self.numbered = module.decoded is None or bool(module.selections) or _orders(module)
        self._states = [(item, np.dtype(item.dtype)) for item in module.states]
        self.fixed, self.all_rounds = lay.is_fixed(module), rounds(module)
        self._bounds, self._most = Memo(), Memo()

    def payload_bytes(self, n: int) -> int:
        """The most bytes that the payload of n elements takes; known before any data."""
        n = self.count(n)
        return self._bounds.once(n, lambda: lay.payload_bytes(self.module, n, self.params))

    def count(self, n: int) -> int:
        """A number of elements. Raises UsageError."""
        try:
            count = operator.index(n)
        except TypeError:
            raise UsageError(f"{self.name}: {n!r} is no number of elements") from None
        if count < 0:
            raise UsageError(f"{self.name}: {n} elements")
        if count > LARGEST and self.numbered:
            raise UsageError(
                f"{self.name}: indices are int32, too small for a tensor of {n} elements; "
                "encode it in parts"
            )
        return count

    def seed(self, seed: int) -> int:
        """The seed of a rank's own draws: 64 bits."""
        return self._whole("seed", seed) & (2**64 - 1)

    def step(self, step: int) -> int:
        """The step, which all draws depend on: an int64."""
        step = self._whole("step", step)
        if not -(2**63) <= step < 2**63:
            raise UsageError(f"{self.name}: step {step} is not an int64")
        return step

    def workers(self, workers: int) -> int:
        """A number of ranks."""
        if (count := self._whole("workers", workers)) < 1:
            raise UsageError(f"{self.name}: {count} workers; there is at least one")
        return count

    def tensors(self, tensors: int) -> int:
        """A number of tensors."""
        if (count := self._whole("tensors", tensors)) < 0:
            raise UsageError(f"{self.name}: {count} tensors")
        return count

    def shape(self, shape: Shape) -> Shape:
        """A tensor's shape: Python integers, none negative."""
        try:
            sizes = tuple(map(operator.index, shape))
        except TypeError:
            raise UsageError(
                f"{self.name}: a shape is a sequence of whole numbers, not {shape!r}"
            ) from None
        if min(sizes, default=0) < 0:
            raise UsageError(f"{self.name}: a shape has no negative number, as {sizes} has")
        return sizes

    def _whole(self, name: str, value: int) -> int:
        try:
            return operator.index(value)
        except TypeError:
            message = f"{self.name}: {name} is a whole number, not {value!r}"
            raise UsageError(message) from None

    def table(self, table: I64, at: I64, length: int, name: str) -> tuple[I64, I64]:
        """Check a batch's table and positions; pieces are parts of the array `name` of `length`
        elements.

        Returns both in the form that kernels take.
        """
        if not is_held(table) or self.host:
            wanted = np.asarray(table) if is_held(table) else table
            table = once(table, "host", lambda: checked_table(wanted, self.name))
        end = once(table, "end", lambda: self._end(table))
        if end > length:
            raise UsageError(f"{self.name}: a piece ends at {end}, {name} has {length} elements")
        return table, self._positions(at, table)

    def _end(self, table: I64) -> int:
        """The largest end of a table's pieces, in elements. Raises UsageError for negative
        numbers."""
        if is_held(table):
            checked_table(table, self.name)
        if len(table) == 0:
            return 0
        if (least := int(table.min())) < 0:
            raise UsageError(f"{self.name}: a number of the table is {least}; none is negative")
        self.count(int(table[:, LENGTH].max()))
        return furthest(table[:, START], table[:, LENGTH])

    def _positions(self, at: I64, table: I64) -> I64:
        """Starts of the payloads of a table's pieces."""
        at = self.numbers(at, "at")
        if at.shape != (len(table),):
            raise UsageError(
                f"{self.name}: the table has {len(table)} rows, and at {len(at)} positions"
            )
        if len(at) and (first := once(at, "least", lambda: int(at.min()))) < 0:
            raise UsageError(f"{self.name}: a payload begins at byte {first}")
        return at

    def numbers(self, numbers: I64, what: str, ndim: int = 1) -> I64:
        """The int64 argument `what`, in the form that kernels take."""
        if is_held(numbers) and not self.host:
            return numbers
        wanted = np.asarray(numbers) if is_held(numbers) else numbers
        return once(
            numbers, "host", lambda: cast(I64, checked(wanted, self.name, what, INTS, ndim))
        )

    def capacity(self, table: I64, capacity: I64, state: State | None) -> I64:
        """Elements that each filter may keep of each piece, int64 [m]; capacity: bytes per payload
        [m]."""
        if not cuts(self.module) or state is None:
            raise UsageError(
                f"{self.name}: a capacity needs a selection by filter, and a state for elements "
                "that are cut"
            )
        capacity = self.numbers(capacity, "capacity")
        if len(capacity) != len(table):
            raise UsageError(
                f"{self.name}: the table has {len(table)} rows, and capacity {len(capacity)}"
            )
        return once_with(capacity, "most", (table,), lambda: self._most_of(table, capacity))

    def _most_of(self, table: I64, capacity: I64) -> I64:
        pairs = zip(table[:, LENGTH].tolist(), capacity.tolist(), strict=True)
        return hold(np.array([self._most_in(n, size) for n, size in pairs], np.int64))

    def _most_in(self, n: int, capacity: int) -> int:
        key = (n, min(capacity, self.payload_bytes(n)))
        result = self._most.once(key, lambda: most_in(self.module, self.params, *key))
        if result < 0:
            raise UsageError(f"{self.name}: no payload of {n} elements fits into {capacity} bytes")
        return result

    def room(self, table: I64, at: I64, have: int, capacity: I64 | None = None) -> None:
        """Check that an array of `have` bytes has room for the pieces' payloads."""
        need = once_with(at, "room", (table, capacity), lambda: self._need(table, at, capacity))
        if need > have:
            raise UsageError(f"{self.name}: the payloads need {need} bytes, out has {have}")

    def overlap(self, table: I64, at: I64, others: I64, there: int) -> bool:
        """True if room for a payload at `at` and at `others` overlaps; `others` is relative to
        byte `there` of the array of `at`."""
        key = ("overlap", there)
        return once_with(at, key, (table, others), lambda: self._overlap(table, at, others + there))

    def _overlap(self, table: I64, at: I64, others: I64) -> bool:
        rooms = np.array([self.payload_bytes(n) for n in table[:, LENGTH].tolist()], np.int64)
        order = np.argsort(at)
        begins, ends = at[order], np.maximum.accumulate((at + rooms)[order])
        before = np.searchsorted(begins, others + rooms)  # payloads that begin before another's end
        return bool(np.any((before > 0) & (ends[before - 1] > others) & (rooms > 0)))

    def _need(self, table: I64, at: I64, capacity: I64 | None = None) -> int:
        """Bytes that the payloads need at most: the largest end."""
        most = map(self.payload_bytes, table[:, LENGTH].tolist())
        sizes = most if capacity is None else map(min, most, capacity.tolist())
        return max(map(operator.add, at.tolist(), sizes), default=0)

    def incoming(self, incoming: Incoming, table: I64) -> Incoming:
        """Incoming payloads of a table's pieces."""
        payload, at, used = incoming
        at = self._positions(at, table)
        self.lengths(payload, table, at, used)
        return Incoming(payload, at, used)

    def lengths(self, payload: U8, table: I64, at: I64, used: Any) -> None:
        """Check starts of the pieces' payloads, and the bytes of each."""
        if not isinstance(used, np.ndarray):
            self._lengths_there(payload, table, at, used)
            return
        end = once_with(at, "lengths", (table, used), lambda: self._ends(table, at, used))
        if end is None or end > len(payload):
            raise PayloadError(f"{self.name}: the payload ends early, at byte {len(payload)}")
        once_with(used, "fixed", (table,), lambda: self._sizes(table, used))

    def _ends(self, table: I64, at: I64, used: I64) -> int | None:
        """The largest end of the payloads, in bytes; None for a wrong number of lengths, or
        negative ones."""
        if len(used) != len(at) or (len(at) and int(used.min()) < 0):
            return None
        return furthest(at, used) if len(at) else 0

    def _sizes(self, table: I64, used: I64) -> None:
        """Check lengths of payloads of fixed length."""
        for row, size in zip(table, used, strict=True) if self.fixed else ():
            if size != self.payload_bytes(int(row[LENGTH])):
                raise PayloadError(
                    f"{self.name}: a payload of {row[LENGTH]} elements has "
                    f"{self.payload_bytes(int(row[LENGTH]))} bytes, this one {size}"
                )

    def _lengths_there(self, payload: U8, table: I64, at: I64, used: Any) -> None:
        """Check bytes used that are in device memory. Kernels compare them with headers, but not
        with the end of the payloads' array, so it must have room for the longest payloads."""
        if str(used.dtype) != "int64" or len(used) != len(at):
            raise UsageError(
                f"{self.name}: used in device memory is an int64 vector of {len(at)} elements, "
                f"not {used.dtype} of {len(used)}"
            )
        need = once_with(at, "room", (table, None), lambda: self._need(table, at))
        if need > len(payload):
            raise PayloadError(
                f"{self.name}: the payloads may take {need} bytes, and there are {len(payload)}; "
                "give used in host memory where the array ends earlier"
            )

    def state(self, state: State | None, table: I64) -> None:
        """Check the states, from init_state(n), of all pieces of a batch."""
        if state is None or len(table) == 0:
            return
        if not isinstance(cast(object, state), Mapping):
            kind = type(state).__name__
            raise UsageError(f"{self.name}: the state comes from init_state(n); this is {kind}")
        if not self._states:
            return
        most = once(table, "states", lambda: furthest(table[:, STATE], table[:, LENGTH]))
        tensors = once(table, "tensors", lambda: int(table[:, TENSOR].max()) + 1)
        for item, dtype in self._states:
            held, need = state.get(item.name), tensors if item.shape == "scalar" else most
            if held is not None:
                self._check_state(item, held, dtype)
            have = 0 if held is None else len(held)
            if have < need:
                raise UsageError(
                    f"{self.name}: state {item.name!r} has {have} elements, {need} are needed"
                )

    def _check_state(self, item: Field, held: Any, dtype: np.dtype[Any]) -> None:
        """Check the array of a state."""
        if self.host:
            wrong = fault(held, dtype, write=True)
        else:
            kind = str(getattr(held, "dtype", type(held).__name__))
            wrong = "" if kind == item.dtype else kind
        if wrong:
            raise UsageError(
                f"{self.name}: state {item.name!r} is {item.storage}, a contiguous vector of "
                f"{dtype} to write to, not {wrong}; init_state(n) makes it"
            )

    def rounds(self, payloads: Before, count: int, x: int, table: I64) -> None:
        """Check payloads of the first `count` rounds, of pieces in x elements."""
        if not 1 <= len(payloads) == count <= len(self.all_rounds):
            raise UsageError(
                f"{self.name}: round {count - 1} of {len(self.all_rounds)} with "
                f"{len(payloads) - 1} before it"
            )
        for round_, (payload, at) in zip(self.all_rounds, payloads, strict=False):
            self.table(table, at, x, "x")
            sizes = [round_.payload_bytes(int(n)) for n in table[:, LENGTH]]
            if any(a + size > len(payload) for a, size in zip(at.tolist(), sizes, strict=True)):
                raise PayloadError(f"{self.name}: round {round_.name!r} ends early")


# ---- inputs -------------------------------------------------------------------------------------
# Arrays of a codec's callers, checked and in the form that kernels take.


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
            result = self.arguments.incoming(raw, table)
            if there is not None and self.arguments.overlap(table, at, result.at, there):
                raise UsageError(
                    f"{self.name}: out is written while the incoming payloads are read, and the "
                    "two have memory in common"
                )
            return result

        result = once_with(at, key, (table, raw.at, raw.used), checked)
        return Incoming(payload, result.at, result.used)

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
