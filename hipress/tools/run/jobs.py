"""The job of a rank and the result of a run; both travel as JSON."""

import importlib.util
import sys
from dataclasses import dataclass, field
from typing import Any

from hipress.optim.optimizer_kinds import kind_of
from hipress.tools.run import methods
from hipress.tools.run.corpus import VOCABULARY
from hipress.tools.run.netns import parse_rate

LSTM = "lstm"
#: purposes of a job: to train, to measure link and compressors, to trace the step after the last
TRAINED, PROBED, TRACED = "train", "probe", "trace"
WARMUP = 4  # first steps are not timed: DDP rebuilds its buckets, PowerSGD starts, kernels compile


#: fields of `hipress.report(...).measured` in seconds a step, and their column heads
PHASES = {
    "encode_seconds": "encode",
    "decode_seconds": "decode",
    "wait_seconds": "wait",
    "exposed_seconds": "exposed",
}


@dataclass(frozen=True)
class Workload:
    """A model, its data and its optimizer.

    The defaults: 12.4 million parameters, about 0.115 s a step on one core.
    """

    vocabulary: int = VOCABULARY
    width: int = 512  # of the embedding and of the LSTM
    batch: int = 8  # sequences per rank and step
    length: int = 35  # words per sequence
    optimizer: str = "sgd"  # a key of model.OPTIMIZERS
    seed: int = 1
    device: str = "cpu"  # or "cuda": a GPU a rank, or ranks share those of a host
    model: str = LSTM  # or package.module:function, see model.make

    @property
    def parameters(self) -> int:
        """Parameters of the LSTM."""
        lstm = 8 * self.width * (self.width + 1)
        return 2 * self.vocabulary * self.width + self.vocabulary + lstm


def check_model(name: str) -> None:
    """Raise ValueError for a name that is neither a workload nor a function of a module."""
    if name == LSTM:
        return
    where, colon, function = name.partition(":")
    if not (where and colon and function):
        raise ValueError(f"model {name!r}: expected lstm, or package.module:function")
    sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(where)
    except ImportError as error:
        raise ValueError(f"model {name!r}: {error}") from error
    if spec is None:
        raise ValueError(f"model {name!r}: no module {where!r}")


def trained_by(optimizer: str) -> str:
    """The workload's optimizer that a name stands for, sgd or adamw. Raises ValueError."""
    kind = kind_of(optimizer)
    if optimizer.lower() not in ("sgd", "adam", "adamw"):
        raise ValueError(f"optimizer {optimizer!r}: the workload trains with sgd or adamw")
    return "adamw" if kind == "adam" else "sgd"


def patience(hosts: int, rate: str) -> float:
    """Seconds that a step may take: two minutes, and ten times what fp32 needs on emulated links.
    rate: of these; another text for links whose speed is not known."""
    try:
        bits = parse_rate(rate)
    except ValueError:
        return 120.0
    return 120.0 + 10 * 2 * hosts * Workload().parameters * 32 / bits


@dataclass(frozen=True)
class Job:
    """A training with one method; all methods have the same start and the same batches."""

    method: str
    hosts: int = 2  # ranks: one a host, or `per_host`
    steps: int = 60
    workload: Workload = field(default_factory=Workload)
    timeout: float = 120.0  # seconds without a step that make the run fail
    untimed: int | None = None  # first steps; None: WARMUP, but at most half of them
    purpose: str = TRAINED  # TRAINED, PROBED or TRACED
    per_host: int = 1  # of the `hosts` ranks

    @property
    def warmup(self) -> int:
        """The number of steps that are not timed."""
        return min(WARMUP, self.steps // 2) if self.untimed is None else self.untimed


@dataclass(frozen=True)
class Curve:
    """Every step of a round: seconds on rank 0, and the mean of the ranks' losses."""

    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Result:
    """Measurements of a run, or the `error` that prevented them."""

    method: str
    label: str
    hosts: int
    warmup: int = 0
    seconds: list[float] = field(default_factory=list)  # of every step, on rank 0
    losses: list[float] = field(default_factory=list)  # of every step, mean of the ranks
    payload_bytes: float | None = None  # a rank sends in a step, by the program's own counters
    wire_bytes: float | None = None  # the same by the interface's counters, headers included
    identical: bool | None = (
        None  # the ranks' parameters, bit by bit, at the end; None without communication
    )
    error: str | None = None
    date: str = ""  # date of the measurement, if not the report's
    peak_bytes: float | None = None  # peak memory of a rank's process, libraries included
    tried: list[dict[str, Any]] = field(default_factory=list)  # by "auto": plan.trial.Tried
    parameters: int | None = None  # of the model
    phases: dict[str, float] | None = None  # a timed step: PHASES, spared_bytes; on rank 0
    curves: list[Curve] = field(default_factory=list)  # of merged rounds

    @property
    def timed(self) -> list[float]:
        """Seconds of the steps after the warm-up; of an outer loop its rounds' means."""
        return methods.by_round(self.method, self.seconds[self.warmup :])
