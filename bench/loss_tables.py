"""Tables of README.md and docs, and the evidence that hipress ships, made from cells.

python -m bench.losses          # measures
python -m bench.pages           # writes the tables and hipress/choose/evidence.json
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import compll
from bench.loss_cells import BASELINES, FP32, MOMENTUM, SHARDED, TRIAL, Cell, spec_of
from bench.loss_workloads import ALL, OTHERS, WORKLOADS
from compll.numerics.numbers import F32
from compll.runtime import library
from hipress.choose.evidence import Finding
from hipress.optim.optimizer_kinds import KINDS
from hipress.tools.run import methods

Place = tuple[str, int, str]  # workload, steps, data
ELEMENTS, STEPS = 4096, 3  # gradients by which codecs are compared


@dataclass(frozen=True)
class Row:
    """A method's effect on a workload's loss, over the seeds with which fp32 was measured, too."""

    method: str
    workload: str
    steps: int
    seeds: int
    loss: float
    bits: float  # per element, that a rank sends in a step
    difference: float  # of the mean from fp32's, relative
    error: float  # standard error of that mean, relative; 0 of one seed
    spread: tuple[float, float]  # least and largest difference of a seed

    @property
    def lost(self) -> bool:
        """True if the loss is surely more than 1% above that of fp32."""
        return self.finding("", {}, {}).lost

    def finding(self, codec: str, params: dict[str, Any], options: dict[str, Any]) -> Finding:
        """The finding in hipress's form."""
        kind = ALL[self.workload].kind
        if self.method.startswith(MOMENTUM):
            kind = f"momentum-{kind.removeprefix('plain-')}".removesuffix("-adam")
        return Finding(
            codec, params, options, kind, self.workload, self.steps, self.seeds,
            None if math.isnan(self.difference) else round(self.difference, 5),
            0.0 if math.isnan(self.error) else round(self.error, 5),
            self.method.startswith(TRIAL),
        )  # fmt: skip


def rows(cells: Sequence[Cell]) -> list[Row]:
    """A row for each method, workload and number of steps: the data with the most seeds."""
    losses: dict[Place, dict[str, dict[int, Cell]]] = {}
    for cell in cells:
        methods_ = losses.setdefault((cell.workload, cell.steps, cell.data), {})
        methods_.setdefault(cell.method, {})[cell.seed] = cell
    by_key: dict[tuple[str, str, int], Row] = {}
    for by_method in losses.values():
        for seeds in by_method.values():
            row = _row(seeds, by_method.get(FP32, {}))
            if row is not None:
                key = (row.method, row.workload, row.steps)
                by_key[key] = max(by_key.get(key, row), row, key=lambda each: each.seeds)
    return list(by_key.values())


def _row(seeds: dict[int, Cell], plain: dict[int, Cell]) -> Row | None:
    both = sorted(seeds.keys() & plain.keys())
    if not both:
        return None
    ours, theirs = [seeds[s].loss for s in both], [plain[s].loss for s in both]
    first, mean = seeds[both[0]], statistics.fmean(theirs)
    if first.method == FP32:
        theirs = [mean] * len(both)  # how far its own seeds are from their mean
    away = [(a - b) / mean for a, b in zip(ours, theirs, strict=True)]
    return Row(
        first.method, first.workload, first.steps, len(both), statistics.fmean(ours), first.bits,
        statistics.fmean(away), _error(away), (min(away), max(away)),
    )  # fmt: skip


def _error(differences: Sequence[float]) -> float:
    """The standard error of the mean; 0 for one value."""
    count = len(differences)
    return float(np.std(differences, ddof=1)) / math.sqrt(count) if count > 1 else 0.0


def evidence(measured: Iterable[Row]) -> str:
    """The text of hipress/choose/evidence.json: a finding a line."""
    lines = [json.dumps(asdict(each)) for each in _findings(measured)]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _findings(measured: Iterable[Row]) -> Iterator[Finding]:
    for row in sorted(measured, key=lambda row: (row.method, row.workload, row.steps)):
        if row.method not in BASELINES.values() and _counts(row):
            method = methods.parse(f"hipress:{spec_of(row.method)}")
            assert method.codec is not None
            codec = compll.compile(method.codec, "reference", **method.options)
            usual = compll.compile(method.codec, "reference").params
            for each in (codec, *_recoded(codec)):
                options = {k: v for k, v in each.params.items() if v != usual.get(k)}
                yield row.finding(each.name, dict(each.params), options)


def _recoded(codec: compll.Codec) -> Iterator[compll.Codec]:
    """The codec with each parameter changed that decides how values are coded, and no value, so
    that its findings hold. With states a few steps would not show that."""
    for param in library.load(codec.name).params:
        if param.type == "bool" and not codec.states:
            changed = {param.name: not codec.params[param.name]}
            other = compll.compile(codec.name, "reference", **codec.params | changed)
            if not other.states and all(map(np.array_equal, _decoded(other), _decoded(codec))):
                yield other


def _decoded(codec: compll.Codec) -> Iterator[F32]:
    """The values that a stateless codec makes of some gradients."""
    draws = np.random.default_rng(0)
    for step in range(STEPS):
        x = draws.laplace(size=ELEMENTS).astype(np.float32)
        x[:: step + 2] = 0
        yield codec.decode(codec.encode(x, step=step), ELEMENTS, step=step)


def _counts(row: Row) -> bool:
    """True for evidence: averages of gradients, and of OTHERS only those of momentum by optimizers
    that no other workload has. Workloads with other ranks or widths confirm, and all codecs would
    need the others."""
    if row.method.startswith(SHARDED):
        return False
    if row.workload not in OTHERS:
        return True
    return OTHERS[row.workload].kind not in KINDS and row.method.startswith(MOMENTUM)


def head(steps: int) -> tuple[str, ...]:
    """The head of a table of trainings of this number of steps."""
    return (f"{steps} steps", "bits", *(each.about for each in WORKLOADS.values()))


def table(every: Sequence[Row], steps: int, only: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """A line for each method, in the order of their measurement."""
    here = {(row.method, row.workload): row for row in every if row.steps == steps}
    for method in only or dict.fromkeys(method for method, _ in here):
        measured = [here[method, w] for w in WORKLOADS if (method, w) in here]
        if measured:
            bits = f"{statistics.median(row.bits for row in measured):.3g}"
            cells = (_cell(here.get((method, workload))) for workload in WORKLOADS)
            yield (method.replace(":", " "), bits, *cells)


def _cell(row: Row | None) -> str:
    """fp32's loss; for others the distance of the mean from it, and distances by seed."""
    if row is None:
        return ""
    if math.isnan(row.difference):
        return "**diverged**"
    text = f"{row.loss:.3f}" if row.method == FP32 else f"{row.difference:+.2%}"
    if row.seeds > 1:
        text += f" ({row.spread[0]:+.1%} to {row.spread[1]:+.1%})"
    return f"**{text}**" if row.lost and row.method != FP32 else text
