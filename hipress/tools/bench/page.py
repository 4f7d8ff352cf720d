"""The report of a benchmark as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from compll.files import write_file
from hipress.tools import charts
from hipress.tools.bench.measure import off, prediction
from hipress.tools.results import Results, TimeToLoss, Trace, bytes_that_differ, times_to_loss
from hipress.tools.run.figures import PRICE, SPEED, Report, Row, cells, failures, rows
from hipress.tools.run.jobs import LSTM, PHASES
from hipress.tools.run.methods import ALONE, is_ours
from hipress.tools.tracing.spans import comparison


@dataclass(frozen=True)
class Table:
    """A table of the page; cells are text."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Part:
    """A section of the page: an answer, charts as SVG, and tables."""

    title: str
    answer: str
    charts: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=tuple)


def write(results: Results, path: Path) -> None:
    """Writes the page."""
    first = results.reports[0]
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    text = environment.get_template("report.html.j2").render(
        title=f"Gradient synchronization on {first.place}",
        about=f"Measured {first.date[:10]} by hipress {results.version}.",
        problems=[*results.problems, *_problems(results)],
        parts=[
            part
            for number, each in enumerate(results.reports)
            for part in (*parts(each), *_predictions(each, results.traces[number : number + 1]))
        ],
        command=first.command,
        versions=", ".join(f"{name} {value}" for name, value in first.versions.items()),
    )
    write_file(path, text)


def _problems(results: Results) -> list[str]:
    problems = []
    for report in results.reports:
        problems += [f"{report.rate}: failed: {line}" for line in failures(report)]
        problems += [f"{report.rate}: bytes do not agree: {e}" for e in bytes_that_differ(report)]
        drifted = [each.label for each in report.results if each.identical is False]
        problems += [f"{report.rate}: ranks differ after {label}" for label in drifted]
    return problems


def parts(report: Report) -> list[Part]:
    """The sections of a place, a link and a model."""
    good = rows(report.results)
    if not good:
        return [Part(title(report), "Every method failed.")]
    sections = [Part(title(report), answer(good), [charts.steps(report)], _tables(report, good))]
    reached = times_to_loss(report.results)
    if reached:
        table = Table("Seconds to the loss that fp32 ends with", *_loss_rows(reached))
        sections.append(
            Part("Time to equal loss", _fastest(reached), [charts.time_to_loss(report)], [table])
        )
    return sections


def _predictions(report: Report, traces: Sequence[Sequence[Trace]]) -> list[Part]:
    """Predicted steps beside traced ones; empty without any."""
    flat = [trace for some in traces for trace in some]
    if not flat:
        return []
    heads = ("ms", "rank 0", "predicted", "off")
    tables = [Table(t.label, heads, comparison(t.real, t.predicted)) for t in flat]
    worst = max(abs(t.predicted.seconds / t.real.seconds - 1) for t in flat)
    steps = "The backward pass of a step and what follows it until all averages are there"
    return [
        Part("On other links", _crossover(flat), [charts.crossover(report, flat)]),
        Part(
            "Predicted and measured",
            f"{steps}: predictions of these steps are off by {worst:.0%} at most.",
            [charts.timeline(trace) for trace in flat],
            tables,
        ),
    ]


def _crossover(traces: Sequence[Trace]) -> str:
    """A sentence on the bandwidth up to which a method pays over a native bf16 all-reduce."""
    lines = []
    for trace in traces:
        pays = [p.bandwidth for p in trace.sweep if p.seconds < 0.98 * p.bf16]
        if pays:
            lines.append(f"{trace.label} up to {max(pays) * 8e-9:.3g} Gbit/s")
    if not lines:
        return "Predicted: no method gains 2% over bf16 on any link."
    return f"Predicted to gain at least 2% over bf16: {', '.join(lines)}."


def title(report: Report) -> str:
    """The link, the model and its optimizer."""
    load = report.workload
    model = "LSTM language model" if load.model == LSTM else load.model
    rate = {"none": "Loopback", "as it is": "The link as it is"}.get(report.rate, report.rate)
    return f"{rate}: {model}, {load.optimizer}"


def answer(good: Sequence[Row]) -> str:
    """A sentence on the fastest method and PyTorch's fastest."""
    real = [row for row in good if row.result.method not in ALONE]
    ours = [row for row in real if is_ours(row.result.method)]
    theirs = [row for row in real if row not in ours]
    if not ours or not theirs:
        return "Nothing to compare: a method of PyTorch's or one of HiPress's is missing."
    best, peer = (min(each, key=lambda row: row.median) for each in (ours, theirs))
    gain = peer.median / best.median
    verdict = f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times as slow"
    step = f"{best.result.label} takes {1e3 * best.median:.0f} ms a step"
    floor = "" if best.of_floor is None else f", {best.of_floor:.2f} of one without communication"
    return f"{step}{floor}: {verdict} as {peer.result.label} ({1e3 * peer.median:.0f} ms)."


def _tables(report: Report, good: Sequence[Row]) -> list[Table]:
    speed = [(row.result.label, *cells(row)[: len(SPEED)]) for row in good]
    price = [(row.result.label, *cells(row)[len(SPEED) :]) for row in good]
    tables = [Table("Speed", ("method", *SPEED), speed), Table("Price", ("method", *PRICE), price)]
    spent = [row for row in good if row.result.phases is not None]
    if spent:
        note = (
            "Milliseconds a step on rank 0. Encode and decode are codec time, wait is time without "
            "work while gradients are under way, exposed is time after the backward pass."
        )
        cells_ = [(row.result.label, *_phases(row)) for row in spent]
        tables.append(Table("Where the time goes", ("method", *PHASES.values()), cells_, note))
    tried = [plan for each in report.results for plan in each.tried if plan["step_seconds"]]
    if tried:
        heads = ("plan", "predicted ms", "step ms", "off", "verdict")
        worst = max(abs(off(plan)) for plan in tried)
        note = f"Predictions are off by {worst:.0%} at most."
        tables.append(Table('Tried by "auto"', heads, [prediction(e) for e in tried], note))
    return tables


def _phases(row: Row) -> list[str]:
    phases = row.result.phases or {}
    return [f"{1e3 * phases[name]:.1f}" for name in PHASES]


def _loss_rows(reached: Sequence[TimeToLoss]) -> tuple[Sequence[str], list[list[str]]]:
    rounds = max(len(each.seconds) for each in reached)
    heads = ("method", "median s", *(f"seed {n + 1}" for n in range(rounds)))
    body = [[each.label, _seconds(each.median), *map(_seconds, each.seconds)] for each in reached]
    return heads, body


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f}"


def _fastest(reached: Sequence[TimeToLoss]) -> str:
    known = [each for each in reached if each.median is not None]
    if not known:
        return "No method reached the loss that fp32 ends with in every round."
    best = min(known, key=lambda each: each.median or 0.0)
    return f"{best.label} is there first, after {best.median:.1f} s (median of the seeds)."
