"""Common parts of the CUDA backend's kernels, for CuPy and the tests' shim.

[Note: what lives how long] The device copy of a table, and of other numbers, lives as long as the
array that the caller holds (see [Note: held numbers]). For arrays that are not held, the codec
keeps copies of the latest ones, by content; a CUDA graph cannot capture calls with those. Scratch
memory belongs to a stream, on which all encodes of all tables share it, and so do all decodes. It
has a zone that is zero between calls, and one that holds anything, where arrays overlap that a call
does not use at once. It grows with the largest need, and lives while a table that used it does.
What a captured call uses lives as long as the call's table, since the graph points there. Its
scratch memory becomes that of graphs: a replay may run beside later calls of other streams, since
the next one that is not captured gets other memory. Earlier calls may have used the graph's, so its
launches come after them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import groupby
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from compll.backends.cuda.device import DeviceArrays
from compll.backends.cuda.plans import Arena, Items, Place, Plan, Scratch, Source, arranged
from compll.errors import PayloadError, UsageError
from compll.ir.expr import Expr
from compll.ir.layout import is_fixed, payload_bytes
from compll.ir.module import Module
from compll.ir.static import Number, check_matrices
from compll.numerics.numbers import I64
from compll.runtime.arrays import Held, hold, is_held, once
from compll.runtime.batches import Encoding, Rows

# ---- keeping ------------------------------------------------------------------------------------
# Memory that stays on a device between calls.

#: copies that a codec keeps of arrays that nobody holds
KEPT = 256
T = TypeVar("T")


class Device(Protocol):
    """A device that runs kernels: CuPy, or the test-only shim on the CPU."""

    def upload(self, values: NDArray[Any]) -> Any:
        """A copy in device memory. Raises UsageError during a capture of a CUDA graph."""

    def zeros(self, count: int, dtype: str) -> Any:
        """Zeros in device memory. Raises UsageError, as upload; MemoryError."""

    def part(self, zone: Any, place: Place) -> Any:
        """An array within bytes of device memory."""

    def capturing(self) -> bool:
        """True if a CUDA graph is being captured from the current stream."""

    def stream(self) -> int:
        """The current stream, as a number."""

    def settle(self) -> None:
        """Wait until nothing runs on the device. Raises UsageError, as upload."""

    def finish(self) -> None:
        """Wait until the current stream has finished its work. Raises UsageError, as upload."""

    def download(self, array: Any) -> NDArray[Any]:
        """A copy in host memory; waits."""

    def dtype(self, array: Any) -> str:
        """float32, float16 or bfloat16 (uint16 arrays hold bfloat16 bits)."""

    def launch(
        self, gradient: str, kernel: str, grid: int, threads: int, args: tuple[Any, ...]
    ) -> None:
        """Run a kernel for gradients of this dtype, after earlier launches."""


class Lent:
    """Scratch memory for a use on a stream, for all plans and tables that fit."""

    def __init__(self, arrays: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
        self.arrays, self.sizes = arrays, sizes

    def fits(self, wanted: Sequence[int]) -> bool:
        """True if it is large enough for zones of these bytes."""
        return all(size >= least for size, least in zip(self.sizes, wanted, strict=True))

    def shares(self, other: Lent) -> bool:
        """True if it has arrays of the other, from which it has grown or which has grown from it."""
        return any(a is b for a in self.arrays for b in other.arrays)


class Keeper:
    """Memory that a codec's kernels keep on a device. name: the codec's, for messages."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        #: copies of arrays that nobody holds, by content
        self.copies: dict[tuple[Any, ...], Held] = {}
        #: scratch memory by its use and stream: of calls, and of CUDA graphs
        self.lent: WeakValueDictionary[tuple[str, int], Lent] = WeakValueDictionary()
        self.graphs: WeakValueDictionary[tuple[str, int], Lent] = WeakValueDictionary()

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

    def lend(self, name: str, wanted: Sequence[int], last: Lent | None, *, capturing: bool) -> Lent:
        """Scratch memory for the current stream. last: that of the table's last call."""
        key = name, self.device.stream()
        if capturing:
            return self.lend_to_graph(key, wanted, last)
        lent = self.lent.get(key)
        if lent is None or not lent.fits(wanted):
            lent = self.lent[key] = self.spared(partial(self.grown, lent, wanted))
        return lent

    def lend_to_graph(self, key: tuple[str, int], wanted: Sequence[int], last: Lent | None) -> Lent:
        """Scratch memory that graphs have, or take over from calls, which get other memory then. A
        capture on a stream of its own takes over that of the table's last call, unless graphs of
        another stream have it."""
        if last is not None and any(lent.shares(last) for lent in self.graphs.values()):
            last = None
        candidates = (self.graphs.get(key), self.lent.get(key), last)
        fitting = (each for each in candidates if each is not None and each.fits(wanted))
        taken = self.graphs[key] = next(fitting, None) or self.grown(None, wanted)
        for other in [k for k, lent in self.lent.items() if lent.shares(taken)]:
            del self.lent[other]
        return taken

    def grown(self, lent: Lent | None, wanted: Sequence[int]) -> Lent:
        """Scratch memory that is large enough; new parts are zeros."""
        arrays = list(lent.arrays) if lent else [None] * len(wanted)
        sizes = list(lent.sizes) if lent else [-1] * len(wanted)
        for k, size in enumerate(wanted):
            if sizes[k] < size:
                arrays[k], sizes[k] = None, size  # free the old one first
                arrays[k] = self.device.zeros(size, "uint8")
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


# ---- launch -------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound="Launching")
MASK = (1 << 64) - 1
#: reasons for a bad payload, by the bits that decode kernels set
REASONS = {
    1: "a payload's length does not fit its header",
    2: "an index lies outside its tensor, or is not above the one before it",
    3: "a payload's length does not fit its header, and in one an index lies outside its tensor",
}


@dataclass
class Batch:
    """The device side of a table for one plan: everything that a call with it needs, made once.

    pieces: the table itself. scratch: places of its kernels' memory. evaluated: the latest
    host-computed values, with the step and limits that they are for. lent: the latest memory, and
    `arrays` the kernels' in it. captured: memory that CUDA graphs use.
    """

    pieces: I64
    table: Any
    first: Any
    item_at: Any
    used: Any
    scratch: Arena
    blocks: list[int]
    repeats: dict[Expr | int, int]
    evaluated: tuple[Any, NDArray[Any], Any] | None = None
    lent: Lent | None = None
    arrays: tuple[Any, ...] = ()
    captured: list[object] = field(default_factory=list)


class Work(NamedTuple):
    """firsts, begins: int64 [grids, pieces + 1], the first block and item of each piece. scratch:
    places of the kernels' memory."""

    firsts: I64
    begins: I64
    scratch: Arena


def alone(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """A call of kernels, after those of other threads."""

    @wraps(method)
    def within(self: L, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return within


class Launching:
    """A source's kernels on a device. See [Note: what lives how long] in launch.py."""

    arrays = DeviceArrays()

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        make_device: Callable[[Source], Device],
        code: Source,
    ) -> None:
        self.module, self.params, self.source = module, dict(params), code
        self.make_device, self.device = make_device, make_device(code)
        #: held by a call while it launches: launches of two threads' calls on one stream would
        #: interleave, over the same scratch memory
        self.lock = threading.RLock()
        self.fuses, self.merges, self.fixed = bool(code.hops), code.merges, is_fixed(module)
        self.rows = Rows(params)
        self.items = Items(module, self.params, code.shape.tile)
        self.keeper = Keeper(self.device, module.name)
        #: errors that decode kernels found, a bit each (see REASONS)
        with self.arrays.stream():  # whose work may still use the memory's previous content
            self.errors = self.device.zeros(1, "uint32")
            self.device.settle()  # the first call may use another stream
        self.ticks = threading.local()

    @contextmanager
    def ticking(self, tick: Any) -> Iterator[None]:
        """A context in which this thread's captured calls add to `step` a uint64 in device memory,
        so that replays of a CUDA graph have steps of their own. Numbers that the host computes from
        the step, such as a warm-up's ratio, stay those of the capture."""
        ticks = self.ticks.__dict__.setdefault("own", [])
        ticks.append(tick)
        try:
            yield
        finally:  # contexts may end in any order
            ticks[:] = [each for each in ticks if each is not tick]

    @property
    def tick(self) -> Any:
        """The tick of a call that is captured. Calls of others that share the codec have none."""
        ticks = self.ticks.__dict__.get("own")
        return ticks[-1] if ticks and self.device.capturing() else None

    # batches

    def batch(self, name: str, table: I64) -> Batch:
        """The device side of a table, made once."""
        make = partial(self.make_batch, self.source.plans[name])
        return self.keeper.once(table, (self, name), make)

    def make_batch(self, plan: Plan, table: I64) -> Batch:
        lengths = table[:, 1].tolist()
        for n in lengths:
            check_matrices(plan.matrices, n)
        work = self.share_work(plan, lengths)
        most = [payload_bytes(self.module, n, self.params) for n in lengths]
        upload = self.device.upload
        return Batch(
            pieces=np.array(table),  # whose own values hold this batch
            table=upload(table.reshape(-1)),
            first=upload(work.firsts.reshape(-1)),
            item_at=upload(work.begins.reshape(-1)),
            used=upload(np.array(most, np.int64)),
            scratch=work.scratch,
            blocks=[int(b) for b in work.firsts[:, -1]],
            repeats={
                e: self.items.rounds(e, lengths) for s in plan.steps if (e := s.repeat) is not None
            },
        )

    def share_work(self, plan: Plan, lengths: Sequence[int]) -> Work:
        """Division of pieces of these lengths among a plan's kernels."""
        shape = len(plan.grids), len(lengths)
        counts = [[self.items.count(g, n) for n in lengths] for g in plan.grids]
        items = np.array(counts, np.int64).reshape(shape)
        blocks = -(-items // np.array([[g.per_block] for g in plan.grids]))
        firsts, begins = starts(blocks), starts(items)
        totals = {"items": begins[:, -1].tolist(), "blocks": firsts[:, -1].tolist()}

        def count(s: Scratch) -> int:
            return s.factor * (len(lengths) if s.grid < 0 else int(totals[s.of][s.grid]))

        arrays = tuple((s.dtype, count(s)) for s in plan.scratch)
        scratch = arranged(arrays, plan.lives, [s.kept for s in plan.scratch])
        return Work(firsts, begins, scratch)

    def scratch_bytes(self, n: int) -> int:
        """Device memory that the calls of a training need for a tensor of n elements besides their
        arguments: that of encodes, with states if any, of merges and of decodes, each of which have
        a stream of their own; CUDA graphs have as much again."""
        plans = self.source.plans
        if self.module.rounds:
            plans = {name: plan for name, plan in plans.items() if name.startswith("round")}
        fed = {"encode": "feed"} | {name: f"{name}_feed" for name in plans if name != "encode"}
        most: dict[str, NDArray[np.int64]] = {}
        for name, plan in plans.items():
            if fed.get(name) not in plans:
                sizes = np.array(self.share_work(plan, [n]).scratch.zones)
                lane = "merges" if name == "add" else use_of(name)
                most[lane] = np.maximum(most.get(lane, 0), sizes)
        return sum(int(sizes.sum()) for sizes in most.values())

    def lend(self, use: str, b: Batch) -> tuple[Any, ...]:
        """Scratch memory for a table and a use, which shares it with no other."""
        capturing = self.device.capturing()
        lent = self.keeper.lend(use, b.scratch.zones, b.lent, capturing=capturing)
        if lent is not b.lent:
            part = self.device.part
            b.arrays = tuple(part(lent.arrays[place.zone], place) for place in b.scratch.places)
            b.lent = lent
        if capturing:
            b.captured += (lent, b.evaluated)
        return b.arrays

    def begin(self, x: Any, b: Batch) -> tuple[Any, ...]:
        """The first arguments of every kernel."""
        return x, b.table, b.first, b.item_at, np.int32(len(b.pieces))

    def encode_args(
        self, name: str, b: Batch, x: Any, out: Any, at: Any, how: Encoding
    ) -> tuple[Any, ...]:
        """Arguments of kernels of an encode or a round; states and scratch follow."""
        return (
            *self.begin(x, b), out, at, self.statics(name, b, how.step, how.most),
            np.uint64(how.seed & MASK), np.uint64(how.step & MASK), self.tick,
            np.float32(how.scale), np.int32(how.writeback), b.used,
        )  # fmt: skip

    def decode(
        self, payload: Any, table: I64, at: I64, used: Any, out: Any, *, add: bool, step: int = 0
    ) -> None:
        """Decode all pieces into out, or add them to it; with `at` [k, m], k payloads of each
        piece."""
        name = "add" if add else "set"
        b = self.batch(name, table)
        args = (
            *self.begin(out, b), payload, self.place(at), used, self.statics(name, b, step),
            np.uint64(step & MASK), self.tick, self.errors, np.int32(at.size // max(1, len(table))),
        )  # fmt: skip
        self.run(name, b, args, self.device.dtype(out))

    def run(self, name: str, b: Batch, args: tuple[Any, ...], gradient: str) -> None:
        """Launch the steps of a plan. Neighbouring steps that repeat do so together."""
        scratch = self.lend(use_of(name), b)
        args = (*args, *scratch)
        with whole(scratch):
            for expr, group in groupby(self.source.plans[name].steps, key=lambda s: s.repeat):
                steps = list(group)
                for _ in range(1 if expr is None else b.repeats[expr]):
                    for step in steps:
                        blocks = len(b.pieces) if step.grid < 0 else b.blocks[step.grid]
                        if blocks:
                            self.device.launch(gradient, step.kernel, blocks, step.threads, args)

    def states(self, name: str, state: Mapping[str, Any] | None, table: I64) -> tuple[Any, ...]:
        """The states that a plan takes."""
        if state is None:
            return ()
        if any(s.shape == "scalar" for s in self.module.states):
            self.refuse_shared(table)
        return tuple(state[s] for s in self.source.plans[name].states)

    # cached numbers

    def statics(self, name: str, b: Batch, step: int, most: I64 | None = None) -> Any:
        """Host-computed values in device memory, float64 [m * statics]; uploaded if they differ
        from the last ones. most: the most elements that filters may keep of each piece."""
        plan = self.source.plans[name]
        follows = self.rows.follow_step(name, plan.statics)
        asked = (step if follows else 0, None if most is None else most.tobytes())
        evaluated = b.evaluated
        if evaluated is None or evaluated[0] != asked:
            values = self.rows.of(name, plan.statics, b.pieces, step, most).reshape(-1)
            same = evaluated is not None and np.array_equal(evaluated[1], values, equal_nan=True)
            upload = partial(self.device.upload, values)
            place = evaluated[2] if evaluated and same else self.keeper.spared(upload)
            evaluated = b.evaluated = (asked, values, place)
        return evaluated[2]

    def place(self, numbers: I64) -> Any:
        """Numbers in device memory; uploaded once."""
        upload = self.device.upload
        return self.keeper.once(numbers, (self, "place"), lambda held: upload(held.reshape(-1)))

    def refuse_shared(self, table: I64) -> None:
        """Raise UsageError if two pieces would update one tensor's state: pieces run at the same
        time."""
        if once(table, "shared", lambda: len(np.unique(table[:, 2])) < len(table)):
            raise UsageError(
                f"{self.module.name}: no two pieces of a batch on a device may belong to one "
                "tensor, whose state they would both update; encode them in separate calls"
            )

    def raise_found(self) -> None:
        """Raise PayloadError for a bad payload that an earlier decode found; waits."""
        with self.arrays.stream():
            error = int(self.device.download(self.errors)[0])
            if error:
                self.errors[:] = 0  # in place: a captured CUDA graph writes here
        if error:
            raise PayloadError(f"{self.module.name}: {REASONS[min(error, 3)]}")


def use_of(plan: str) -> str:
    """The use of a plan's scratch memory: encodes and decodes have streams of their own in a step,
    and may run at once."""
    return "decodes" if plan in ("set", "add", "rounds", "rounds_feed") else "encodes"


@contextmanager
def whole(scratch: Sequence[Any]) -> Iterator[None]:
    """A context for a plan's launches: if not all of them are done, scratch memory is zeroed."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the device may have failed: the first error tells more
            for array in scratch:
                array[:] = 0
        raise


def starts(counts: I64) -> I64:
    """Running totals of each row, beginning with zero."""
    return np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0))).astype(np.int64)
