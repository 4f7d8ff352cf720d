"""The results of a benchmark: measurements as JSON, and conclusions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from compll.files import write_json
from hipress import __version__
from hipress.errors import ConfigError
from hipress.reading import read_json
from hipress.tools.run.figures import Report, final_loss, rows, smooth
from hipress.tools.run.jobs import Result
from hipress.tools.run.methods import ALONE, BY_FORMULA
from hipress.tools.tracing.spans import Point, Process, Span

FORMAT = 1
ENOUGH = 100  # fewest steps whose losses are compared
AGREE = 0.02  # largest relative difference of counted and interface bytes
HEADERS = 0.07  # largest share that TCP, IP and Ethernet add to payloads
SMALL = 20_000  # further bytes of a step: keep-alives, comparisons


@dataclass(frozen=True)
class Trace:
    """A step of a method on rank 0 with its prediction, and predictions for other links."""

    method: str
    label: str
    real: Process
    predicted: Process
    rest: float  # seconds of a step besides its backward pass
    alone: float  # seconds of a backward pass without synchronization
    sweep: list[Point]

    @classmethod
    def of(cls, method: str, label: str, done: Mapping[str, Any]) -> Self:
        """The trace of a traced job's `done` event."""
        real, predicted = (
            Process(name, tuple(Span(*each) for each in done[key]))
            for name, key in (("rank 0", "spans"), ("predicted", "predicted"))
        )
        sweep = [Point(*each) for each in done["sweep"]]
        return cls(method, label, real, predicted, done["rest"], done["alone"], sweep)


@dataclass(frozen=True)
class Results:
    """The measurements of a benchmark."""

    reports: list[Report]  # one per place, link and model
    traces: list[list[Trace]] = field(default_factory=list)  # by report: of methods by wrap
    profile: dict[str, Any] | None = None  # as `hipress probe` writes it
    version: str = __version__
    format: int = FORMAT
    problems: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Writes JSON."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of `write`. Raises ConfigError with the path and the mistake."""
        results = read_json(path, "results of `hipress bench`", cls, FORMAT)
        for each in (one for report in results.reports for one in report.results):
            if each.error is None and not (each.losses and each.timed and min(each.timed) > 0):
                raise ConfigError(f"{path}: {each.label!r} has no losses, or no timed steps")
        return results


@dataclass(frozen=True)
class TimeToLoss:
    """Seconds until a method reaches fp32's final loss, by round; None if it does not."""

    method: str
    label: str
    seconds: tuple[float | None, ...]

    @property
    def median(self) -> float | None:
        """The median over the rounds; None if one did not reach the loss."""
        reached = [each for each in self.seconds if each is not None]
        if not reached or len(reached) < len(self.seconds):
            return None
        return statistics.median(reached)


def times_to_loss(results: Sequence[Result]) -> list[TimeToLoss]:
    """Times to loss of all synchronizing methods, with warm-up; () without fp32 or enough steps."""
    fp32 = next((each for each in results if each.method == "ddp-fp32"), None)
    if fp32 is None or fp32.error or not fp32.curves or len(fp32.curves[0].losses) < ENOUGH:
        return []
    targets = [smooth(curve.losses)[-1] for curve in fp32.curves]
    return [
        TimeToLoss(each.method, each.label, tuple(_reach(each, targets)))
        for each in results
        if each.error is None and each.method not in ALONE
    ]


def _reach(result: Result, targets: Sequence[float]) -> Iterator[float | None]:
    for curve, target in zip(result.curves, targets, strict=False):
        clock = accumulate(curve.seconds)
        losses = smooth(curve.losses)
        yield next((now for now, loss in zip(clock, losses, strict=True) if loss <= target), None)


def bytes_that_differ(report: Report) -> list[str]:
    """A line for each method whose own byte count differs from the interface's."""
    lines: list[str] = []
    if report.per_host > 1:  # ranks of a host also send to each other, which no interface sees
        return lines
    for each in report.results:
        sent, wire = each.payload_bytes, each.wire_bytes
        if each.error or each.method in (*ALONE, *BY_FORMULA) or not sent or wire is None:
            continue
        sent -= (each.phases or {}).get("spared_bytes", 0)
        if not sent * (1 - AGREE) <= wire <= sent * (1 + AGREE + HEADERS) + SMALL:
            lines.append(
                f"{each.label}: {sent / 1e6:.2f} MB a step counted, {wire / 1e6:.2f} MB by the "
                "interface"
            )
    return lines


@dataclass(frozen=True)
class Compared:
    """A method in two results. Seconds a step, and losses."""

    where: str
    label: str
    before: float
    after: float
    spread: float  # half the width between the 10th and 90th percentiles, the larger of both
    loss_before: float
    loss_after: float

    @property
    def change(self) -> float:
        """The relative change of the step time."""
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        """ "slower" or "faster" if the change exceeds the spread of steps."""
        if abs(self.after - self.before) <= self.spread:
            return "within the spread"
        return "slower" if self.change > 0 else "faster"


def compare(before: Results, after: Results) -> list[Compared]:
    """All methods that both have, for the same place, link, model and optimizer."""
    old = dict(_by_key(before))
    return [_compare(old[key], row, key[0]) for key, row in _by_key(after) if key in old]


def _by_key(results: Results) -> Iterator[tuple[tuple[str, ...], Any]]:
    for report in results.reports:
        load = report.workload
        where = f"{report.hosts} ranks, {report.rate}, {load.model}, {load.optimizer}"
        for row in rows(report.results):
            yield (where, row.result.method), row


def _compare(old: Any, new: Any, where: str) -> Compared:
    spread = max((each.high - each.low) / 2 for each in (old, new))
    losses = final_loss(old.result), final_loss(new.result)
    return Compared(where, new.result.label, old.median, new.median, spread, *losses)


def differences(before: Results, after: Results) -> list[str]:
    """Differences in versions and processors of two results, which may not be comparable."""
    one, two = (_machine(each) for each in (before, after))
    names = sorted({*one, *two})
    return [
        f"{name}: {one.get(name, 'unknown')} before, {two.get(name, 'unknown')} after"
        for name in names
        if one.get(name) != two.get(name)
    ]


def _machine(results: Results) -> Mapping[str, str]:
    versions = results.reports[0].versions if results.reports else {}
    return {**versions, "hipress": results.version}
