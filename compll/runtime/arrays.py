"""Memory of a codec's arrays: NumPy's, or a device's.

[Note: held numbers] A call checks its tables. A backend on a device also copies them there and
derives from them how its kernels share the work. For an array from `hold` both are done once, in
the first call, and the results stay as long as that array lives: nothing else drops them, so a CUDA
graph may point to them while its owner keeps the array.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from compll.errors import PayloadError, UsageError
from compll.numerics.numbers import I64

# ---- held ---------------------------------------------------------------------------------------
# Numbers that a caller holds: tables, positions and lengths that many calls take unchanged.

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
        result = self.get(key, self)
        if result is self:
            result = make()
            if len(self) >= MOST:
                self.clear()
            self[key] = result
        return result  # type: ignore[no-any-return]


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
    entry = numbers.kept.get(key)
    if entry is None or any(a is not b for a, b in zip(entry[0], others, strict=True)):
        entry = numbers.kept[key] = (others, make())
    return entry[1]


# ---- arrays -------------------------------------------------------------------------------------

FLOATS, INTS, BYTES = (np.dtype(kind) for kind in (np.float32, np.int64, np.uint8))


class Arrays(Protocol):
    """Makes and checks the arrays of one kind of memory."""

    #: true for memory that the host reads without waiting
    host: bool

    def vector(self, x: Any, name: str, *, write: bool = False) -> Any:
        """x as a flat view; kernels write to it if `write` is set. Raises UsageError if x does not
        fit.

        Without `write` it may be read-only.
        """

    def payload(self, raw: Any, name: str) -> Any:
        """A payload as a flat uint8 array. Raises PayloadError."""

    def raw(self, x: Any, name: str) -> Any:
        """A caller's array of any other kind, in the form that kernels take. Raises UsageError."""

    def view(self, x: Any, name: str) -> Any:
        """x in a form that the other methods accept without checks. Raises UsageError."""

    def payloads(self, x: Any, name: str, what: str, *, write: bool = False) -> Any:
        """The argument `what`, payloads of a batch, as kernels take it. Raises UsageError."""

    def stream(self) -> AbstractContextManager[Any]:
        """A context in which launches come after the caller's launches."""

    def address(self, x: Any) -> int:
        """Address of a vector's first element."""

    def empty(self, count: int, dtype: str) -> Any:
        """An array with any content."""

    def zeros(self, count: int, dtype: str) -> Any:
        """An array of zeros."""


class HasArrays(Protocol):
    """An object with arrays in one kind of memory."""

    arrays: Any


O = TypeVar("O", bound=HasArrays)  # noqa: E741
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[O, P], R]


def on_stream(method: Method[O, P, R]) -> Method[O, P, R]:
    """The method of an object with `arrays`, run in the context of their stream."""

    @wraps(method)
    def within(self: O, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.arrays.stream():
            return method(self, *args, **kwargs)

    return within


class _Unlocked:
    """The memory of a read-only array, without its flag."""

    def __init__(self, x: NDArray[Any]) -> None:
        self.owner = x
        self.__array_interface__ = x.__array_interface__ | {"data": (x.ctypes.data, False)}


def _open(x: NDArray[Any]) -> NDArray[Any]:
    """x for kernels, whose signatures have writable arrays only; they do not write to this one."""
    return x if x.flags.writeable else np.asarray(_Unlocked(x))


def fault(x: Any, dtype: np.dtype[Any], ndim: int = 1, *, write: bool = False) -> str:
    """The reason why kernels cannot take x unchanged, or ""."""
    # a quick check of the usual case: encoding a few elements takes only 10 us
    if type(x) is np.ndarray and x.dtype == dtype and x.ndim == ndim and x.flags.carray:
        return ""
    if not isinstance(x, np.ndarray):
        return type(x).__name__
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array, whose mask would be lost"
    if x.dtype != dtype or x.ndim != ndim:
        return f"{x.dtype} {x.shape}"
    if not x.flags.c_contiguous:
        return f"one with strides {x.strides}"
    if not x.flags.aligned:
        return f"one that begins at address {x.ctypes.data:#x}, within a number"
    return "a read-only one" if write and not x.flags.writeable else ""


def checked(
    x: Any, name: str, what: str, dtype: np.dtype[Any], ndim: int = 1, *, write: bool = False
) -> Any:
    """The argument `what`, a vector in host memory, as kernels take it. Raises UsageError."""
    if wrong := fault(x, dtype, ndim, write=write):
        raise UsageError(f"{name}: {what} is a contiguous {dtype} vector, not {wrong}")
    return _open(x)


def checked_table(x: Any, name: str) -> I64:
    """A batch's table in the form that kernels take. Raises UsageError."""
    wrong = fault(x, INTS, 2)
    if wrong or x.shape[1] != 5:
        wrong = wrong or f"{x.dtype} {x.shape}"
        raise UsageError(f"{name}: table is a contiguous int64 array [m, 5], not {wrong}")
    return _open(x)


def _conversion(x: Any) -> str:
    """A hint for making a contiguous float32 array of x."""
    if isinstance(x, np.ndarray):
        if x.dtype == FLOATS:
            return "; np.ascontiguousarray(x) makes one"
        return "; x.astype(np.float32) makes one" if x.dtype.kind in "fiu" else ""
    return "; x.detach().numpy() of a CPU tensor is one" if hasattr(x, "detach") else ""


class HostArrays:
    """NumPy arrays."""

    host = True

    def vector(self, x: Any, name: str, *, write: bool = False) -> NDArray[np.float32]:
        """x as float32 [n]. Raises UsageError."""
        if wrong := fault(x, FLOATS, getattr(x, "ndim", 1)):
            message = f"{name}: a contiguous float32 array is needed, not {wrong}"
            raise UsageError(message + ("" if "mask" in wrong else _conversion(x)))
        if write and not x.flags.writeable:
            raise UsageError(f"{name}: the result goes into this array, which is read-only")
        return _open(x.reshape(-1))

    def raw(self, x: Any, name: str) -> Any:
        """x itself: kernels and checks of their arguments look at it."""
        return x

    view = raw

    def payloads(self, x: Any, name: str, what: str, *, write: bool = False) -> NDArray[np.uint8]:
        """A uint8 vector. Raises UsageError."""
        array: NDArray[np.uint8] = checked(x, name, what, BYTES, write=write)
        return array

    def stream(self) -> AbstractContextManager[None]:
        """A context that does nothing: calls return when they are done."""
        return nullcontext()

    def address(self, x: NDArray[Any]) -> int:
        """Address of a vector's first element."""
        return int(x.ctypes.data)

    def payload(self, raw: Any, name: str) -> NDArray[np.uint8]:
        """bytes or a uint8 vector. Raises PayloadError; UsageError for a masked array."""
        if isinstance(raw, np.ma.MaskedArray):
            raise UsageError(f"{name}: a payload is bytes or a uint8 vector, not a masked array")
        data = np.ascontiguousarray(np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else raw)
        if data.dtype != np.uint8 or data.ndim != 1:
            raise PayloadError(
                f"{name}: a payload is a uint8 vector, not {data.dtype} {data.shape}"
            )
        return _open(data)

    def empty(self, count: int, dtype: str) -> NDArray[Any]:
        """Uninitialized."""
        return np.empty(count, dtype)

    def zeros(self, count: int, dtype: str) -> NDArray[Any]:
        """Zeros."""
        return np.zeros(count, dtype)
