"""Measured effects of codecs on the loss of trained models: see docs/measurements/losses.md.

`python -m bench.pages` makes evidence.json from the results of `python -m bench.losses`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, cast

from casync.codec import Codec
from hipress.optim.optimizer_kinds import AVERAGED, PLAIN_SGD

#: specs that need no evidence while steps use gradients: they lose nothing, or round float32 to 16
#: bits without bias; and their bits per element on measured gradients
HARMLESS = {"lossless": 27.4, "lossless_bf16": 11.4, "bf16_sr": 16.0}
LIMIT, SURELY = 0.01, 0.05  # relative to fp32's loss: see Finding
SLACK = SURELY - LIMIT  # relative, at two standard errors: what `within` leaves to chance
MANY_HOPS = 8  # ranks of a ring from which errors that do not cancel count
ENOUGH = 600  # steps of all seeds: three of 200, or one of 1000


@dataclass(frozen=True)
class Finding:
    """Measured effect of a codec on the loss of one workload."""

    codec: str
    params: Mapping[str, Any]  # all parameters
    given: Mapping[str, Any]  # parameters that are not the spec's defaults
    optimizer: str  # one of KINDS
    workload: str  # of bench.losses
    steps: int
    seeds: int
    difference: float | None  # relative difference of the mean loss from fp32's; None: diverged
    error: float  # relative standard error of that mean over the seeds; 0 for one seed
    trial: bool = False  # True after turns of a trial, each of which began with states of zero

    @property
    def key(self) -> str:
        """The codec's name, with parameters that are not the spec's defaults."""
        return self.codec + "".join(f" {name}={value}" for name, value in self.given.items())

    @property
    def lost(self) -> bool:
        """True if the loss is more than LIMIT above fp32's, by two standard errors."""
        return self.difference is None or self.difference - 2 * self.error > LIMIT

    @property
    def kept(self) -> bool:
        """True if the loss is not lost, and at most SURELY above fp32's by two standard errors. A
        finding that is neither kept nor lost proves nothing: its seeds differ too much."""
        return not self.lost and cast(float, self.difference) + 2 * self.error <= SURELY

    def within(self, accepted: float) -> bool:
        """True if the mean loss is at most `accepted` (a share) above fp32's, and with two standard
        errors at most SLACK more."""
        if self.difference is None:
            return False
        return self.difference <= accepted and self.difference + 2 * self.error <= accepted + SLACK

    def __str__(self) -> str:
        loss = "diverged" if self.difference is None else f"loss {self.difference:+.1%}"
        seeds = f"{self.seeds} seed{'s' * (self.seeds > 1)}"
        return f"{loss} against fp32 after {self.steps} steps of {self.workload}, {seeds}"


@cache
def findings() -> tuple[Finding, ...]:
    """All measured findings."""
    text = resources.files("hipress.choose").joinpath("evidence.json").read_text("utf-8")
    return tuple(Finding(**each) for each in json.loads(text))


def of(codec: Codec, optimizer: str | None = None) -> tuple[Finding, ...]:
    """Findings on a codec with these parameters, under an optimizer of this kind (None: any that
    averages gradients); () without evidence."""
    return tuple(
        each
        for each in findings()
        if each.codec == codec.name and each.params == codec.params and _counts(each, optimizer)
    )


def trusted(optimizer: str | None) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
    """Specs that kept the loss on every workload with this kind of optimizer (None: with every
    kind), and those that need no evidence; each as key, name, and parameters that are not defaults.
    """
    by_key: dict[str, list[Finding]] = {}
    for each in findings():
        by_key.setdefault(each.key, []).append(each)
    proven = tuple(
        (key, some[0].codec, some[0].given)
        for key, some in by_key.items()
        if _hold(some, optimizer)
    )
    harmless = () if optimizer in AVERAGED else HARMLESS
    return proven + tuple((name, name, {}) for name in harmless if name not in by_key)


def accepted(optimizer: str, loss: float) -> dict[str, Finding]:
    """The finding of the largest loss for each key whose findings under this kind of optimizer are
    all within `loss`, a share. Counted over seeds, each of its workloads was measured for at least
    ENOUGH steps."""
    by_key: dict[str, list[Finding]] = {}
    for each in findings():
        if each.optimizer == optimizer:
            by_key.setdefault(each.key, []).append(each)
    every = {each.workload for some in by_key.values() for each in some}
    return {
        key: max(some, key=_loss)
        for key, some in by_key.items()
        if all(_steps(some, workload) >= ENOUGH for workload in every)
        and all(each.within(loss) for each in some)
    }


def _steps(some: Sequence[Finding], workload: str) -> int:
    return sum(each.steps * each.seeds for each in some if each.workload == workload)


def _hold(some: Sequence[Finding], optimizer: str | None) -> bool:
    counted = [each for each in some if _counts(each, optimizer)]
    workloads = {each.workload for each in counted if each.kept}
    return workloads >= _workloads(optimizer) and not any(each.lost for each in counted)


def _workloads(optimizer: str | None) -> set[str]:
    return {each.workload for each in findings() if _counts(each, optimizer)}


def _counts(finding: Finding, optimizer: str | None) -> bool:
    """True if the finding counts for a kind of optimizer (None: any that averages gradients). SGD
    with momentum and without count for each other."""
    if finding.trial:  # only `accepted` uses these
        return False
    if optimizer is None:
        return finding.optimizer not in AVERAGED
    sgd = ("sgd", PLAIN_SGD)
    return finding.optimizer in (sgd if optimizer in sgd else (optimizer,))


def swamps(codec: Codec, strategy: str, ranks: int) -> bool:
    """True if errors of rounding add up where partial sums go around so many ranks: sums grow, and
    a codec that is not unbiased loses alike at each hop what is small beside them."""
    fair = codec.name in HARMLESS or getattr(codec, "unbiased", False)
    return strategy == "ring" and ranks >= MANY_HOPS and not fair


def worst(codec: Codec, optimizer: str | None) -> Finding | None:
    """The worst finding on a codec under this kind of optimizer; None if it lost nowhere."""
    lost = [each for each in of(codec, optimizer) if each.lost]
    return max(lost, key=_loss, default=None)


def _loss(finding: Finding) -> float:
    return math.inf if finding.difference is None else finding.difference
