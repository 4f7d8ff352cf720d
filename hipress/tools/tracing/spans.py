"""Spans of a step: their file for Perfetto and chrome://tracing, and their sums."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compll.files import write_file

BACKWARD, BUCKET, ENCODE, MERGE, DECODE, WIRE = (
    "backward", "bucket", "encode", "merge", "decode", "wire",
)  # fmt: skip
#: lanes of a process, from the top
LANES = ("pass", "buckets", "codec", "wire")
_LANE = {BACKWARD: "pass", BUCKET: "buckets", WIRE: "wire"}


@dataclass(frozen=True)
class Span:
    """An interval of work on a lane. Seconds since the step's beginning."""

    what: str  # BACKWARD, BUCKET, ENCODE, MERGE, DECODE or WIRE
    begin: float
    end: float
    bucket: int | None = None  # in the order of readiness
    detail: str = ""

    @property
    def name(self) -> str:
        """Label such as `encode bucket 3`; the same for recorded and predicted spans."""
        if self.bucket is None:
            return self.what
        return (
            f"bucket {self.bucket}" if self.what == BUCKET else f"{self.what} bucket {self.bucket}"
        )

    @property
    def lane(self) -> str:
        """Lane on which the span is drawn, one of LANES."""
        return _LANE.get(self.what, "codec")


@dataclass(frozen=True)
class Process:
    """The spans of a rank, or of the prediction."""

    name: str
    spans: tuple[Span, ...]

    def busy(self) -> dict[str, float]:
        """Seconds by kind of span; overlapping spans count once."""
        by_name: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            by_name[span.what].append(span)
        return {what: _covered(spans) for what, spans in by_name.items()}

    @property
    def seconds(self) -> float:
        """Seconds until all spans have ended."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds from the end of the backward pass to the end of all spans."""
        over = max((span.end for span in self.spans if span.what == BACKWARD), default=0.0)
        return max(0.0, self.seconds - over)


@dataclass(frozen=True)
class Point:
    """Predicted seconds of a step at a bandwidth in bytes a second."""

    bandwidth: float
    seconds: float
    fp32: float  # seconds with the native all-reduce
    bf16: float  # seconds with a native all-reduce of 16 bits


def _covered(spans: Iterable[Span]) -> float:
    total = reached = 0.0
    for span in sorted(spans, key=lambda each: each.begin):
        total += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return total


#: rows of a comparison; a merge may be part of the kernel of an encode
ROWS = ("encode, merge", "decode", "wire", "exposed", "step")


def comparison(real: Process, predicted: Process) -> list[tuple[str, str, str, str]]:
    """For each of ROWS: name, recorded and predicted milliseconds, and the prediction's error."""
    rows = []
    for name in ROWS:
        took, forecast = _seconds(real, name), _seconds(predicted, name)
        off = f"{forecast / took - 1:+.0%}" if took else "-"
        rows.append((name, f"{1e3 * took:.1f}", f"{1e3 * forecast:.1f}", off))
    return rows


def _seconds(process: Process, name: str) -> float:
    if name == "step":
        return process.seconds
    if name == "exposed":
        return process.exposed
    busy = process.busy()
    return sum(busy.get(what, 0.0) for what in name.split(", "))


def write(processes: Sequence[Process], path: Path) -> None:
    """Write the Trace Event Format (JSON), with times in microseconds."""
    events = [event for pid, each in enumerate(processes) for event in _events(pid, each)]
    write_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _events(pid: int, process: Process) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process.name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    rows: dict[str, list[float]] = {lane: [] for lane in LANES}
    for span in sorted(process.spans, key=lambda each: (each.begin, -each.end)):
        tid = 100 * LANES.index(span.lane) + _row(rows[span.lane], span)
        yield {
            "ph": "X", "name": span.name, "cat": span.what, "pid": pid, "tid": tid,
            "ts": 1e6 * span.begin, "dur": 1e6 * (span.end - span.begin),
            "args": {"task": span.detail} if span.detail else {},
        }  # fmt: skip
    for number, lane in enumerate(LANES):
        for row in range(len(rows[lane])):
            name = lane if row == 0 else f"{lane} {row + 1}"
            tid = 100 * number + row
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            order = {"sort_index": tid}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": order}


def _row(rows: list[float], span: Span) -> int:
    """A free row of the lane: a viewer would show overlapping spans of a row as nested calls."""
    for row, end in enumerate(rows):
        if end <= span.begin:
            rows[row] = span.end
            return row
    rows.append(span.end)
    return len(rows) - 1
