"""What codecs did to the loss: tables of README.md and docs/compressors.md, and what specs claim.

python -m bench.training --group loss-sgd --group loss-adamw    # measures
python -m bench.spec_table                                      # writes the tables
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipress.demo import methods
from hipress.demo.report import Report, Row, rows

LIMIT = 0.01  # of fp32's loss, above which it is not kept
SGD, ADAMW = "loss-sgd", "loss-adamw"  # groups of bench.training


@dataclass(frozen=True)
class Loss:
    """A method's loss under both optimizers; None where it was not measured."""

    method: str
    label: str
    sgd: Row | None
    adamw: Row | None

    @property
    def spec(self) -> str | None:
        """The codec's spec; None for a baseline."""
        return methods.parse(self.method).codec

    @property
    def optimizers(self) -> str:
        """What a spec may claim by this: `any`, `sgd`, `none`, or `unknown`."""
        if self.sgd is not None and not kept(self.sgd):
            return "none"
        if self.sgd is None or self.adamw is None:
            return "unknown"
        return "any" if kept(self.adamw) else "sgd"


def kept(row: Row) -> bool:
    """Whether the loss is at most LIMIT above fp32's."""
    return row.loss_difference is not None and row.loss_difference <= LIMIT


def read(results: Path) -> list[Loss]:
    """What was measured, in the order of the group under SGD."""
    found = {name: _rows(results / f"{name}.json") for name in (SGD, ADAMW)}
    order = dict.fromkeys([*found[SGD], *found[ADAMW]])
    return [_loss(name, found[SGD].get(name), found[ADAMW].get(name)) for name in order]


def _rows(path: Path) -> dict[str, Row]:
    return {row.result.method: row for row in rows(Report.read(path).results)}


def _loss(method: str, sgd: Row | None, adamw: Row | None) -> Loss:
    known = sgd or adamw
    assert known is not None
    return Loss(method, known.result.label, sgd, adamw)


def claims(losses: Sequence[Loss]) -> dict[str, str]:
    """What each spec may claim: the least of its rows, whose parameters differ."""
    order = ("none", "sgd", "any")
    found: dict[str, str] = {}
    for loss in losses:
        if loss.spec is not None and loss.optimizers in order:
            known = found.get(loss.spec, "any")
            found[loss.spec] = min(known, loss.optimizers, key=order.index)
    return found


HEAD = ("", "MB of payload a step", "SGD lr 1, clip .25", "AdamW lr .002, clip 1")


def cells(losses: Sequence[Loss]) -> Iterator[tuple[str, ...]]:
    """A line for each method."""
    for loss in losses:
        known = loss.sgd or loss.adamw
        assert known is not None
        sent = known.result.payload_bytes
        size = "-" if sent is None else f"{sent / 1e6:.2f}"
        yield (loss.label, size, _cell(loss.sgd), _cell(loss.adamw))


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    away = "-" if row.loss_difference is None else f"{row.loss_difference:+.2%}"
    return f"{row.loss:.3f} ({away})"
