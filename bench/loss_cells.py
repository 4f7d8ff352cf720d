"""Cells of losses.jsonl, one per line: a loss, and how and when it was measured."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

CELLS = Path(__file__).parent / "results" / "losses.jsonl"
FP32 = "fp32"
MOMENTUM = "momentum:"  # before a spec that compresses averages of momentum
TRIAL = "trial:"  # before a spec with its own states: zeroed as in a trial of "auto"
SHARDED = "shard:"  # before the compressors of gradients and weights of FSDP2, joined by +
#: names of PyTorch's own methods here, by their names in `hipress demo`
BASELINES = {"ddp-fp32": FP32, "ddp-fp16": "torch-fp16", "powersgd": "torch-powersgd:rank=4"}


@dataclass(frozen=True)
class Cell:
    """A method's loss under one workload, seed and number of steps."""

    workload: str
    method: str  # fp32, or a spec with its options: topk:ratio=0.01, momentum:onebit_fine
    seed: int
    steps: int
    data: str  # a short hash of the training data
    loss: float  # the one that counts, see loss_workloads; NaN if it diverged
    curve: list[float]  # the training loss, means of ten steps
    bits: float  # per element, that a rank sends in a step
    seconds: float
    date: str
    command: str
    versions: dict[str, str]

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        """The identity of a cell."""
        return self.workload, self.method, self.seed, self.steps, self.data

    def line(self) -> str:
        """A line of JSON, which has no NaN."""
        data = asdict(self)
        data["loss"] = _number(self.loss)
        data["curve"] = [_number(each) for each in self.curve]
        return json.dumps(data)

    @classmethod
    def parse(cls, line: str) -> Self:
        """Parse a line that `line` wrote."""
        data: dict[str, Any] = json.loads(line)
        data["loss"] = math.nan if data["loss"] is None else data["loss"]
        data["curve"] = [math.nan if each is None else each for each in data["curve"]]
        return cls(**data)


def read(path: Path = CELLS) -> list[Cell]:
    """All recorded cells; none if there is no file."""
    return [Cell.parse(line) for line in path.read_text().splitlines()] if path.exists() else []


def spec_of(method: str) -> str:
    """A method's spec, with its options."""
    return method.removeprefix(MOMENTUM).removeprefix(TRIAL)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
