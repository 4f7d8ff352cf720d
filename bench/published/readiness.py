"""Times at which gradients are ready: the roofline's order and times, and those of a V100."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.published.data import FOLDER
from bench.published.hipress_paper import model_of
from hipress.tools.models.device_speeds import DEVICES

__all__ = ["Readiness", "measured", "readiness"]

Floats = NDArray[np.float64]
_QUANTILES = (np.arange(400) + 0.5) / 400


@dataclass(frozen=True)
class Readiness:
    """Mean error of a byte's ready time, as a share of the backward pass."""

    model: str
    milliseconds: float  # of the backward pass, as measured
    roofline: float
    elements: float  # in proportion to elements
    measured: Floats  # shares of the pass by quantiles of bytes
    predicted: Floats


def measured(name: str) -> tuple[Floats, Floats]:
    """Numbers of elements, and seconds since the first gradient was ready, from a profile."""
    data = json.loads((FOLDER / "espresso_profiles.json").read_text("utf-8"))
    rows = np.array(data["profiles"][name], np.float64)
    return rows[:, 0], 1e-6 * np.cumsum(rows[:, 1])


def readiness() -> Iterator[Readiness]:
    """Results for all profiles. Times since the first gradient, as in the profiles."""
    data = json.loads((FOLDER / "espresso_profiles.json").read_text("utf-8"))
    for name in data["profiles"]:
        sizes, times = measured(name)
        model = model_of(name)
        ours = np.array([float(each.numel) for each in model.gradients])
        ready = np.array(model.timed(DEVICES["v100"].speed).ready)
        true = _by_bytes(sizes, times / times[-1])
        roofline = _by_bytes(ours, (ready - ready[0]) / (ready[-1] - ready[0]))
        elements = _by_bytes(ours, np.cumsum(ours) / ours.sum())
        yield Readiness(
            name, 1e3 * float(times[-1]), _off(roofline, true), _off(elements, true), true, roofline
        )


def _off(shares: Floats, true: Floats) -> float:
    return float(np.abs(shares - true).mean())


def _by_bytes(sizes: Sequence[float] | Floats, ready: Floats) -> Floats:
    """Share of the pass after which each quantile of the bytes is ready."""
    share = np.cumsum(sizes) / np.sum(sizes)
    return ready[np.minimum(np.searchsorted(share, _QUANTILES), len(ready) - 1)]
