"""The course of an outer loop: when rounds are, and what is done with their averages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from hipress.errors import ConfigError
from hipress.model.rounding import add_product

KEPT = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class OuterSGD:
    """SGD on agreed weights x, by the averaged pseudo-gradient d of a round.

    ::

        m = momentum m + d
        x -= lr (d + momentum m)    # without nesterov: lr m

    With lr 1 and no momentum, the agreed weights are the average of the sites' weights.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        for name, most in (("lr", float("inf")), ("momentum", 1.0)):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int | float)
            if wrong or not 0 <= value < most:
                raise ConfigError(f"{name} of OuterSGD is a number from 0 on, below {most:g}: "
                                  f"not {value!r}")  # fmt: skip
        if not isinstance(self.nesterov, bool):
            raise ConfigError(f"nesterov of OuterSGD is True or False, not {self.nesterov!r}")

    def step(
        self, agreed: torch.Tensor, average: torch.Tensor, momentum: torch.Tensor | None
    ) -> None:
        """Change agreed weights and momentum; `average` is overwritten. All flat float32 [n], the
        momentum None without one. Sites with different processors get the same bits."""
        way = average
        if momentum is not None:
            momentum.mul_(self.momentum).add_(average)
            way = momentum
            if self.nesterov:
                add_product(average, momentum, self.momentum)
                way = average
        add_product(agreed, way, -self.lr)


@dataclass(frozen=True)
class Schedule:
    """Rounds of an outer loop; see `Outer` for the members."""

    every: int = 100
    fragments: int = 1
    delay: int = 0
    mix: float | None = None
    outer: OuterSGD = field(default_factory=OuterSGD)
    clip: str | None = None
    keep: str = "float32"

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is a whole number from {least} on, not {value!r}")
        if self.fragments > self.every:
            raise ConfigError(
                f"fragments={self.fragments} rounds do not fit into every={self.every} steps: at "
                f"most {self.every} do, one a step"
            )
        if self.every % self.fragments:
            raise ConfigError(
                f"every={self.every} steps do not divide into fragments={self.fragments} rounds: "
                f"{self.every // self.fragments * self.fragments} do"
            )
        if self.delay >= self.spacing:
            raise ConfigError(
                f"delay={self.delay}: a round must end before the next begins, so at most "
                f"{self.spacing - 1} steps after its begin (every={self.every} steps, "
                f"fragments={self.fragments})"
            )
        self._check_rest()

    def _check_rest(self) -> None:
        number = isinstance(self.mix, int | float) and not isinstance(self.mix, bool)
        if self.mix is not None and not (number and 0 < self.mix <= 1):
            raise ConfigError(f"mix is a share in (0, 1] or None, not {self.mix!r}")
        if not isinstance(self.outer, OuterSGD):
            raise ConfigError(
                f"outer is a hipress.OuterSGD(lr, momentum, nesterov), not {self.outer!r}"
            )
        if self.clip not in (None, "median"):
            raise ConfigError(f'clip is None or "median", not {self.clip!r}')
        if self.keep not in KEPT:
            raise ConfigError(f"keep is one of {', '.join(KEPT)}, not {self.keep!r}")

    def __str__(self) -> str:
        text = f"every {self.every} steps"
        text += f", {self.fragments} fragments" if self.fragments > 1 else ""
        text += f", delay {self.delay}" if self.delay else ""
        text += f", mix {self.mix}" if self.mix is not None else ""
        text += f", clip {self.clip}" if self.clip else ""
        text += f", agreed weights in {self.keep}" if self.keep != "float32" else ""
        return f"{text}, {self.outer}"

    @property
    def spacing(self) -> int:
        """Steps from the begin of a round to that of the next."""
        return self.every // self.fragments

    @property
    def course(self) -> str:
        """Text on when rounds are: what a count of steps, or a round under way, depends on."""
        names = "every", "fragments", "delay", "mix"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


#: arguments of `Outer` by name of a method; others may be given beside them
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    # Douillard et al. 2023, arXiv 2311.08105: 500 steps of AdamW, Nesterov, float32
    "diloco": {"every": 500, "compressor": "none", "outer": OuterSGD(0.7, 0.9)},
    # Douillard et al. 2025, arXiv 2501.18512: parts in turn, mixed by half, 4 bits. The paper's
    # parts are 3 layers each, and its 4 bits are floats
    "streaming": {
        "every": 100, "fragments": 4, "delay": 5, "mix": 0.5, "compressor": "int4_group",
        "outer": OuterSGD(0.4, 0.9),
    },
    # Sarfi et al. 2025, arXiv 2508.15706: 64 of 4096 elements, 2 bits; the residual, decayed by
    # 0.95, is the momentum. Covenant-72B, arXiv 2603.08163: the median of norms. The outer rate is
    # that of its code, github.com/tplr-ai/templar, hparams.json of the model of 70B
    "sparseloco": {
        "every": 30, "compressor": "sparseloco", "clip": "median",
        "outer": OuterSGD(1.0, 0.0, nesterov=False),
    },
    # Therien et al. 2025, arXiv 2505.23725: Muon steps the sites; rate, momentum and steps as in
    # their code, github.com/bentherien/muloco-1. 4 bits by quantiles are ours
    "muloco": {"every": 30, "compressor": "nf4", "outer": OuterSGD(0.7, 0.6)},
})  # fmt: skip
