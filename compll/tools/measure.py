"""Speed of a codec beside that of memory: `compll bench`.

All rates are GB (10^9 bytes) of float32 gradient per second. The bound of an operation is the time
in which this machine's memory moves the bytes of the operation's passes (traffic.py), at the copy
bandwidth of the same run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from compll.ir.module import POSITIONS
from compll.passes.traffic import traffic_of
from compll.runtime.batches import Incoming
from compll.runtime.codec import Codec
from compll.tools.timing import Job, Timing, timings

OPERATIONS = ("encode", "encode_feedback", "decode", "decode_add", "merge")


@dataclass(frozen=True)
class Rate:
    """GB/s of gradient: median, and spread (half the distance of quartiles over the median).

    moved: bytes per element that the operation reads and writes. share: of the rate at which a copy
    of the same number of bytes runs.
    """

    rate: float
    spread: float
    moved: float
    share: float


@dataclass(frozen=True)
class Row:
    """A codec at one size: `payload` in bytes, `copy` in GB/s read plus written."""

    codec: str
    target: str
    elements: int
    payload: int
    copy: float
    rates: dict[str, Rate]

    @property
    def ratio(self) -> float:
        """Bytes of the gradient per byte of payload."""
        return 4 * self.elements / max(self.payload, 1)

    @property
    def encoding(self) -> Rate:
        """The encode that training uses: with feedback if the spec has it."""
        return self.rates.get("encode_feedback") or self.rates["encode"]

    def data(self) -> dict[str, Any]:
        """Plain values for JSON, by field."""
        return asdict(self)


@dataclass(frozen=True)
class Bench:
    """A codec on a gradient of n elements: timed jobs, and its payload's length."""

    codec: Codec
    elements: int
    payload: int
    jobs: dict[str, Job]
    wait: Job


def prepare(codec: Codec, n: int) -> Bench:
    """Arrays in the codec's memory, filled with normal numbers, and the jobs on them."""
    values = (np.random.default_rng(0).standard_normal(n) * 0.01).astype(np.float32)
    x, y, table, at = _put(codec, values), codec.arrays.zeros(n, "float32"), _table(n), _at()
    out = codec.arrays.zeros(codec.payload_bytes(n), "uint8")
    used = codec.encode_batch(x, table, out, at)
    found: dict[str, Job] = {
        "decode": lambda: codec.decode_batch(out, table, at, used, y),
        "decode_add": lambda: codec.decode_batch(out, table, at, used, y, add=True),
    }
    # A payload of its own, so that decode's stays intact when the state changes its length.
    spare = codec.arrays.zeros(codec.payload_bytes(n), "uint8")
    if not codec.module.updates:
        found["encode"] = lambda: codec.encode_batch(x, table, spare, at)
    if codec.stateful:
        state = codec.init_state(n)
        found["encode_feedback"] = lambda: codec.encode_batch(x, table, spare, at, state=state)
    if codec.fuses:
        found["merge"] = _merge(codec, table, Incoming(out, at, used))
    jobs = {name: found[name] for name in OPERATIONS if name in found}
    return Bench(codec, n, int(used[0]), jobs, _waiter(codec))


def _merge(codec: Codec, table: Any, incoming: Incoming) -> Job:
    """An aggregator's work in one kernel: decode, add, encode, and decode its own payload."""
    n = int(table[0, 1])
    x, out = codec.arrays.zeros(n, "float32"), codec.arrays.zeros(codec.payload_bytes(n), "uint8")
    state = codec.init_state(n) if codec.stateful else None
    return lambda: codec.encode_batch(
        x, table, out, _at(), state=state, writeback=True, incoming=incoming
    )


def copy_job(codec: Codec, n: int) -> Job:
    """A copy of a gradient, in the codec's memory: 8 n bytes read and written."""
    source, target = codec.arrays.zeros(n, "float32"), codec.arrays.zeros(n, "float32")

    def copy() -> None:
        target[...] = source

    return copy


def measure(codec: Codec, n: int, repeat: int) -> Row:
    """Time every operation and a copy in turn."""
    bench = prepare(codec, n)
    took = timings({"copy": copy_job(codec, n), **bench.jobs}, repeat, bench.wait)
    return row(bench, took)


def row(bench: Bench, took: dict[str, Timing]) -> Row:
    """The rates from the timings of `copy` and the codec's jobs."""
    n, copy = bench.elements, 8 * bench.elements / took["copy"].median / 1e9
    rates = {}
    for name in bench.jobs:
        moved, rate = bytes_moved(bench, name), 4 * n / took[name].median / 1e9
        share = rate * moved / 4 / copy
        rates[name] = Rate(rate, took[name].spread, moved, share)
    return Row(bench.codec.name, bench.codec.target, n, bench.payload, copy, rates)


def bytes_moved(bench: Bench, operation: str) -> float:
    """Bytes per element of the gradient that an operation reads and writes."""
    module = bench.codec.module
    if operation.startswith("encode"):
        return traffic_of(module, feed=operation == "encode_feedback").moved
    payload = bench.payload / bench.elements
    if operation == "merge":
        return payload + traffic_of(module, feed=bench.codec.stateful).moved + 4.0
    if operation == "decode":
        return payload + 4.0
    if module.decode.op == "scatter":
        return payload + 8.0 * _kept(bench, module.decode.args[0].type.of)
    return payload + 8.0


def _kept(bench: Bench, selection: str) -> float:
    """The selected elements as a share of all, from the payload's length (gaps of one byte)."""
    parts = bench.codec.module.fields
    fields = [f for f in parts if f.of == selection]
    fields = fields or [f for f in parts if f.of]  # elements of a selection among the selected
    each = sum(1 if f.storage in POSITIONS else f.item_bits / 8 for f in fields)
    return bench.payload / each / bench.elements


def _table(n: int) -> Any:
    return np.array([[0, n, 0, 0, 0]], np.int64)


def _at() -> Any:
    return np.zeros(1, np.int64)


def _put(codec: Codec, values: Any) -> Any:
    """A copy of a host array in the codec's memory."""
    if codec.arrays.host:
        return values
    array = codec.arrays.empty(len(values), "float32")
    array.set(values)
    return array


def _waiter(codec: Codec) -> Job:
    """A function that returns when the device has finished."""
    if codec.arrays.host:
        return lambda: None
    import cupy

    return lambda: cupy.cuda.get_current_stream().synchronize()
