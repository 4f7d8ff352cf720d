"""Speed of a codec beside that of memory: `compll bench`.

All rates are GB (10^9 bytes) of float32 gradient per second. The bound of an operation is the time
in which this machine's memory moves the bytes of the operation's passes (traffic.py), at the copy
bandwidth of the same run.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from compll.files import replacing
from compll.ir.module import POSITIONS
from compll.passes.traffic import traffic_of
from compll.runtime.batches import Incoming
from compll.runtime.codec import Codec

# ---- timing -------------------------------------------------------------------------------------
# Timing: jobs take turns, after a warm-up, and the median of their samples counts.
# A sample repeats a job until it lasts long enough for the clock. Turns are interleaved, so
# that a machine that slows down for a while slows all jobs, and comparisons within a run stay
# fair.

Job = Callable[[], object]
#: least seconds of a sample
SAMPLE = 2e-3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the samples, and their quartiles."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


def timings(
    work: Mapping[str, Job], repeat: int, wait: Job = lambda: None, shortest: float = SAMPLE
) -> dict[str, Timing]:
    """Time every job in `repeat` turns; `wait` returns when all started work has ended."""
    counts = {name: calibrate(job, wait, shortest) for name, job in work.items()}
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeat):
        for name, job in work.items():
            samples[name].append(sample(job, counts[name], wait))
    return {name: summary(seconds) for name, seconds in samples.items()}


def calibrate(job: Job, wait: Job, shortest: float) -> int:
    """Calls per sample. The calls made here also warm up caches and compile lazily compiled
    code."""
    sample(job, 1, wait)
    count = 1
    while (took := sample(job, count, wait) * count) < shortest and count < 1 << 20:
        count = max(2 * count, int(count * min(shortest / max(took, 1e-9), 100)))
    return count


def sample(job: Job, count: int, wait: Job) -> float:
    """Seconds per call of `count` calls."""
    start = time.perf_counter()
    for _ in range(count):
        job()
    wait()
    return (time.perf_counter() - start) / count


def summary(samples: list[float]) -> Timing:
    """Median and quartiles of samples."""
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, low, high)


# ---- measure ------------------------------------------------------------------------------------

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
    prepared: dict[str, Job] = {
        "decode": lambda: codec.decode_batch(out, table, at, used, y),
        "decode_add": lambda: codec.decode_batch(out, table, at, used, y, add=True),
    }
    # A payload of its own, so that decode's stays intact when the state changes its length.
    spare = codec.arrays.zeros(codec.payload_bytes(n), "uint8")
    if not codec.module.updates:
        prepared["encode"] = lambda: codec.encode_batch(x, table, spare, at)
    if codec.stateful:
        state = codec.init_state(n)
        prepared["encode_feedback"] = lambda: codec.encode_batch(x, table, spare, at, state=state)
    if codec.fuses:
        prepared["merge"] = _merge(codec, table, Incoming(out, at, used))
    jobs = {name: prepared[name] for name in OPERATIONS if name in prepared}
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
        return traffic_of(module, with_states=operation == "encode_feedback").moved
    payload = bench.payload / bench.elements
    if operation == "merge":
        return payload + traffic_of(module, with_states=bench.codec.stateful).moved + 4.0
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


# ---- bench report -------------------------------------------------------------------------------
# The output of `compll bench`: a table, JSON, and a roofline plot.

TITLES = {
    "encode": "encode", "encode_feedback": "feedback", "decode": "decode", "decode_add": "add",
    "merge": "merge",
}  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """A row per codec and size. feedback: encode with its states; add: decode and add; merge:
    decode, add and encode in one kernel, as an aggregator does (if the backend has one). ±: the
    largest spread of the row's medians. copy: GB/s read plus written."""
    result = Table(
        title="GB/s of gradient, and % of a copy of the moved bytes",
        title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for head in ("spec", "size", "saves", *TITLES.values(), "±", "copy"):
        result.add_column(head, justify="left" if head == "spec" else "right", overflow="fold")
    for row in rows:
        cells = [cell(row.rates.get(name)) for name in OPERATIONS]
        spread = max(rate.spread for rate in row.rates.values())
        result.add_row(
            row.codec, short(row.elements), f"{row.ratio:.4g}x", *cells,
            f"{spread:.0%}", f"{row.copy:.3g}",
        )  # fmt: skip
    return result


def cell(rate: Rate | None) -> str:
    """A rate and its share of the bound."""
    return "-" if rate is None else f"{rate.rate:.3g} {rate.share:.0%}"


def short(count: int) -> str:
    """A number of elements: 12M, 100k, 4096."""
    for scale, letter in ((10**6, "M"), (10**3, "k")):
        if count % scale == 0:
            return f"{count // scale}{letter}"
    return str(count)


def about() -> dict[str, str]:
    """The machine and the versions that the figures belong to."""
    facts = {"date": date.today().isoformat(), "cpu": cpu(), "python": platform.python_version()}
    for package in ("numpy", "llvmlite"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "none"
    return facts


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def data(rows: Sequence[Row]) -> dict[str, Any]:
    """All measurements, for JSON."""
    return {"about": about(), "rows": [row.data() for row in rows]}


def formats() -> set[str]:
    """Kinds of pictures that can be written, by the endings of their files."""
    from matplotlib.figure import Figure

    return set(Figure().canvas.get_supported_filetypes())


def plot(rows: Sequence[Row], path: Path) -> None:
    """A roofline: the rate of each operation of the largest size over its intensity.

    Intensity is bytes of gradient per byte moved; the roof is the copy bandwidth times that.
    """
    from matplotlib.figure import Figure

    most = max(row.elements for row in rows)
    rows = [row for row in rows if row.elements == most]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    marks = dict(zip(OPERATIONS, "o^sDv", strict=True))
    for name, mark in marks.items():
        points = [(4 / r.rates[name].moved, r.rates[name].rate, r.codec)
                  for r in rows if name in r.rates]  # fmt: skip
        axes.scatter([p[0] for p in points], [p[1] for p in points], marker=mark, s=28,
                     label=TITLES[name], zorder=3)  # fmt: skip
        for x, y, codec in points if len(rows) <= 12 or name.startswith("encode") else ():
            axes.annotate(codec, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    copy = sorted(row.copy for row in rows)[len(rows) // 2]
    spots = [4 / r.moved for row in rows for r in row.rates.values()]
    ends = [min(spots) * 0.8, max(spots) * 1.25]
    axes.plot(ends, [copy * x for x in ends], color="black", label=f"copy: {copy:.1f} GB/s moved")
    axes.set(
        xscale="log", yscale="log", xlabel="bytes of gradient per byte moved",
        ylabel="GB/s of gradient", title=f"{most:,} elements, {rows[0].target}",
    )  # fmt: skip
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)
