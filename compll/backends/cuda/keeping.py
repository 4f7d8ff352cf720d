"""Memory that stays on a device between calls.

[Note: what lives how long] The device copy of a table, and of other numbers, lives as long as the
array that the caller holds (see [Note: held numbers]). For arrays that are not held, the codec
keeps copies of the latest ones, by content; a CUDA graph cannot capture calls with those. Scratch
memory belongs to a plan and a stream, and all tables share it. It is zero before the first call,
and each call leaves it as the next one needs it. It grows with the largest table, and lives while a
table that used it does. Scratch memory of a captured call lives as long as the call's table, since
the graph points there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from numpy.typing import NDArray

from compll.errors import UsageError
from compll.numerics.held import Held, hold, is_held
from compll.numerics.types import I64

#: copies that a codec keeps of arrays that nobody holds
KEPT = 256
T = TypeVar("T")
#: types and lengths of arrays
Wanted = tuple[tuple[str, int], ...]


class Device(Protocol):
    """A device that runs kernels: CuPy, or the test-only shim on the CPU."""

    def upload(self, values: NDArray[Any]) -> Any:
        """A copy in device memory. Raises UsageError during a capture of a CUDA graph."""

    def zeros(self, count: int, dtype: str) -> Any:
        """Zeros in device memory. Raises UsageError, as upload; MemoryError."""

    def capturing(self) -> bool:
        """True if a CUDA graph is being captured from the current stream."""

    def stream(self) -> int:
        """The current stream, as a number."""

    def settle(self) -> None:
        """Wait until nothing runs on the device. Raises UsageError, as upload."""

    def finish(self) -> None:
        """Wait until the current stream has finished its work."""

    def download(self, array: Any) -> NDArray[Any]:
        """A copy in host memory; waits."""

    def dtype(self, array: Any) -> str:
        """float32, float16 or bfloat16 (uint16 arrays hold bfloat16 bits)."""

    def launch(
        self, gradient: str, kernel: str, grid: int, threads: int, args: tuple[Any, ...]
    ) -> None:
        """Run a kernel for gradients of this dtype, after earlier launches."""


class Lent:
    """Scratch memory of a plan on a stream, for all tables that fit."""

    def __init__(self, arrays: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
        self.arrays, self.sizes = arrays, sizes

    def fits(self, wanted: Wanted) -> bool:
        """True if it is large enough for these types and lengths."""
        return all(size >= count for size, (_, count) in zip(self.sizes, wanted, strict=True))


class Keeper:
    """Memory that a codec's kernels keep on a device. name: the codec's, for messages."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        #: copies of arrays that nobody holds, by content
        self.copies: dict[tuple[Any, ...], Held] = {}
        self.lent: WeakValueDictionary[tuple[str, int], Lent] = WeakValueDictionary()

    def once(self, numbers: I64, key: Hashable, make: Callable[[Held], T]) -> T:
        """Result of `make` for these numbers. Made once; kept with them."""
        held: Held = numbers if is_held(numbers) else self.copy(numbers)
        if key not in held.kept:
            held.kept[key] = self.spared(lambda: make(held))
            self.device.finish()  # the next call may use another stream
        made: T = held.kept[key]
        return made

    def copy(self, numbers: I64) -> Held:
        """A held copy of numbers that nobody holds. If there are KEPT copies, the older half is
        dropped, once the device does not use them."""
        if self.device.capturing():
            raise UsageError(
                f"{self.name}: a CUDA graph is being captured, and would use copies of this call's "
                "arrays that are dropped some day: give codec.hold(...) of table, at and used, and "
                "keep these as long as the graph"
            )
        key = (numbers.shape, numbers.tobytes())
        if key not in self.copies:
            if len(self.copies) >= KEPT:
                self.device.settle()
                for old in list(self.copies)[: KEPT // 2]:
                    del self.copies[old]
            self.copies[key] = hold(numbers)
        return self.copies[key]

    def lend(self, name: str, wanted: Wanted, last: Lent | None, captured: dict[int, Lent]) -> Lent:
        """A plan's scratch memory for the current stream. last: that of the table's last call,
        which a capture on a stream of its own may use. captured: collects memory of captured calls
        for the graph's owner."""
        key, capturing = (name, self.device.stream()), self.device.capturing()
        lent = self.lent.get(key)
        if capturing and not (lent and lent.fits(wanted)) and last and last.fits(wanted):
            lent = last
        if lent is None or not lent.fits(wanted):
            lent = self.lent[key] = self.spared(partial(self.grown, lent, wanted))
        if capturing:
            captured[id(lent)] = lent
        return lent

    def grown(self, lent: Lent | None, wanted: Wanted) -> Lent:
        """Scratch memory that is large enough; new parts are zeros."""
        arrays = list(lent.arrays) if lent else [None] * len(wanted)
        sizes = list(lent.sizes) if lent else [-1] * len(wanted)
        for k, (dtype, count) in enumerate(wanted):
            if sizes[k] < count:
                arrays[k], sizes[k] = None, count  # free the old one first
                arrays[k] = self.device.zeros(count, dtype)
        return Lent(tuple(arrays), tuple(sizes))

    def spared(self, make: Callable[[], T]) -> T:
        """Result of `make`. If memory runs out, drops all copies of arrays that nobody holds and
        tries again."""
        try:
            return make()
        except MemoryError:
            self.device.settle()
            self.copies.clear()
            return make()

    def clean(self) -> None:
        """Zero all scratch memory, after an interrupted call."""
        for lent in list(self.lent.values()):
            for array in lent.arrays:
                array[:] = 0
