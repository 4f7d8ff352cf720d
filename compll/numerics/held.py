"""Numbers that a caller holds: tables, positions and lengths that many calls take unchanged.

[Note: held numbers] A call checks its tables. A backend on a device also copies them there and
derives from them how its kernels share the work. For an array from `hold` both are done once, in
the first call, and the results stay as long as that array lives: nothing else drops them, so a CUDA
graph may point to them while its owner keeps the array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import numpy as np

from compll.numerics.types import I64

T = TypeVar("T")
#: values of a Memo
MOST = 4096


class Held(np.ndarray[Any, np.dtype[np.int64]]):
    """int64 numbers that do not change. kept: values derived from them, by purpose."""

    kept: dict[Any, Any]

    def __array_finalize__(self, source: object) -> None:
        self.kept = {}

    def part(self, which: int | slice) -> I64:
        """A row or some of them, also held."""
        return once(self, ("part", str(which)), lambda: hold(self[which]))


def hold(numbers: I64) -> Held:
    """A copy of int64 numbers that nobody can change; see [Note: held numbers]."""
    if is_held(numbers):
        return numbers
    made = np.array(numbers, np.int64, order="C").view(Held)
    made.flags.writeable = False
    return made


def is_held(numbers: object) -> TypeGuard[Held]:
    """True if `hold` made this array. A writable copy of it is not held."""
    return type(numbers) is Held and not numbers.flags.writeable


def part(numbers: Any, which: int | slice) -> Any:
    """A row or some of the rows of numbers, held if `numbers` are."""
    return numbers.part(which) if is_held(numbers) else numbers[which]


class Memo(dict[Any, Any]):
    """Values by key, which threads share: never more than MOST, and a value that one thread drops
    is still the other's result."""

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Result of `make()`, or of an earlier one with this key."""
        found = self.get(key, self)
        if found is self:
            found = make()
            if len(self) >= MOST:
                self.clear()
            self[key] = found
        return found  # type: ignore[no-any-return]


def once(numbers: Any, key: object, make: Callable[[], T]) -> T:
    """Result of `make()`. For held numbers, the first result for `key` is kept and returned
    again."""
    if not is_held(numbers):
        return make()
    if key not in numbers.kept:
        numbers.kept[key] = make()
    return numbers.kept[key]  # type: ignore[no-any-return]


def once_with(numbers: Any, key: object, others: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Like `once`, for a result that also depends on `others` (held arrays or None). Only the
    result for the latest `others` is kept."""
    if not (is_held(numbers) and all(o is None or is_held(o) for o in others)):
        return make()
    known = numbers.kept.get(key)
    if known is None or any(a is not b for a, b in zip(known[0], others, strict=True)):
        known = numbers.kept[key] = (others, make())
    return known[1]
