"""Predictions as plain data, for --json, tables and charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from casync.predict.timeline import Event
from hipress import __version__
from hipress.tools.models.known import Model
from hipress.tools.simulate.compared import BASELINE
from hipress.tools.simulate.simulation import Outcome, Simulation

__all__ = ["Curve", "Row", "Table", "Timeline", "curve", "table", "timeline", "to_dict"]

FORMAT = 1
SPANNED = (1.25e7, 4e11)  # bytes a second: 100 Mbit/s to 3200 Gbit/s, least range of a chart
POINTS = 28


@dataclass(frozen=True)
class Row:
    """A method's row of the table. Seconds, and bytes a second."""

    outcome: Outcome
    gain: float | None  # speed-up over the baseline; None if that was not predicted
    pays_up_to: float | None  # as Simulation.pays_up_to
    loss: str
    memory: float  # bytes a rank, without activations


@dataclass(frozen=True)
class Curve:
    """Efficiency by a link's bandwidth, in bytes a second, for each method."""

    bandwidths: tuple[float, ...]
    efficiencies: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Timeline:
    """Work of the lanes in one step of a method, from the first bucket on. Seconds."""

    method: str
    step: float
    backward: float
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Table:
    """Predictions for a model on a cluster, one row per method, fastest first."""

    cluster: str
    model: Model
    alone: float  # seconds of a step of one rank by itself
    bandwidth: float  # bytes a second of the links between nodes, or inside a single node
    rows: tuple[Row, ...]
    assumed: tuple[str, ...]


def table(simulation: Simulation, optimizer: str | None = None) -> Table:
    """All results that the command prints. optimizer: a kind of `hipress.optimizers`."""
    outcomes = simulation.outcomes()
    base = next((each.step for each in outcomes if each.method == BASELINE), None)
    rows = tuple(
        Row(
            each,
            None if base is None else base / each.step,
            simulation.pays_up_to(each.method),
            simulation.methods[each.method].loss(optimizer),
            simulation.memory(each.method, optimizer),
        )
        for each in outcomes
    )
    return Table(
        str(simulation.cluster), simulation.model, simulation.alone_seconds,
        simulation.cluster.bandwidth, rows, simulation.assumed,
    )  # fmt: skip


def curve(simulation: Simulation) -> Curve:
    """Efficiencies for a chart, over a range that includes the cluster's own bandwidth."""
    low, high = SPANNED
    low, high = min(low, simulation.cluster.bandwidth / 4), max(high, simulation.cluster.bandwidth)
    ratio = (high / low) ** (1 / (POINTS - 1))
    bandwidths = tuple(low * ratio**i for i in range(POINTS))
    return Curve(
        bandwidths,
        {
            method: tuple(simulation.outcome(method, each).efficiency for each in bandwidths)
            for method in simulation.methods
        },
    )


def timeline(simulation: Simulation, method: str) -> Timeline:
    """The timeline of one step of a method."""
    step = simulation.step(method)
    return Timeline(method, step.seconds, step.backward, step.events)


def to_dict(
    table: Table, drawn: Curve | None = None, timelines: Sequence[Timeline] = ()
) -> dict[str, Any]:
    """The results for JSON: seconds, bytes, bytes a second. `pays_up_to` is null if a method pays
    on every link, and 0 if on none; it is missing for the baseline."""
    model = table.model
    data: dict[str, Any] = {
        "format": FORMAT, "kind": "simulation", "hipress": __version__, "cluster": table.cluster,
        "bandwidth": table.bandwidth,
        "model": {
            "name": model.name, "source": model.source, "parameters": model.numel,
            "gradients": len(model.gradients), "batch": model.batch, "unit": model.unit,
        },
        "alone_seconds": table.alone, "assumed": list(table.assumed),
        "methods": [_row(each) for each in table.rows],
    }  # fmt: skip
    if drawn is not None:
        data["curve"] = asdict(drawn)
    if timelines:
        data["timelines"] = [asdict(each) for each in timelines]
    return data


def _row(row: Row) -> dict[str, Any]:
    data = {**asdict(row.outcome), "gain": row.gain, "loss": row.loss, "memory": row.memory}
    if row.pays_up_to is not None:
        data["pays_up_to"] = None if math.isinf(row.pays_up_to) else row.pays_up_to
    return data
