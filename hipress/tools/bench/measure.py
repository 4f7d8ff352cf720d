"""Measurement of a suite's methods, in turns.

The methods take turns, round after round, so that a slow minute of the machine affects all of them;
a step time is the median over the timed steps of all rounds.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hipress.tools.run import methods as methods_
from hipress.tools.run.figures import Report, markdown_table, rows
from hipress.tools.run.jobs import LSTM, Curve, Job, Result, Workload, patience
from hipress.tools.run.place import Choice, choose

TRIAL = 80  # steps: three are observed, four plans take 14 each; codecs compile meanwhile
GRAPHS = 45  # steps more over NCCL, where three of them are tried as CUDA graphs, too


@dataclass(frozen=True)
class Suite:
    """Methods that run on the same links with the same workload."""

    methods: tuple[str, ...]
    hosts: int = 2
    per_host: int = 1  # ranks
    rate: str = "1gbit"
    device: str = "cpu"
    optimizer: str = "sgd"
    model: str = LSTM
    steps: int = 20
    rounds: int = 3
    loopback: bool = False
    seeds: bool = False  # another seed in each round

    @property
    def workload(self) -> Workload:
        """The workload of every method."""
        return Workload(optimizer=self.optimizer, device=self.device, model=self.model)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.per_host

    def place(self) -> Choice:
        """Emulated hosts, or loopback. ValueError for a bad rate."""
        return choose(self.hosts, self.rate, per_host=self.per_host, loopback=self.loopback)

    def report(self, sentence: str, results: list[Result], command: str) -> Report:
        """The report of its results at a place that the sentence names."""
        return Report(
            sentence, self.ranks, self.rate, self.steps, self.workload, results, command,
            per_host=self.per_host,
        )  # fmt: skip


def measure(
    suite: Suite, run: Callable[[Job], Result], tell: Callable[[str], object] = print
) -> list[Result]:
    """A result per method, merged from its rounds."""
    results: dict[str, list[Result]] = {method: [] for method in suite.methods}
    for number in range(suite.rounds):
        for method in suite.methods:
            result = run(_job(method, suite, number))
            # as many losses as the other methods: "auto" has more steps, for its trial
            results[method].append(dataclasses.replace(result, losses=result.losses[: suite.steps]))
            turn = f"round {number + 1}/{suite.rounds} " if suite.rounds > 1 else ""
            tell(turn + describe(results[method][-1]))
    return [merge(rounds) for rounds in results.values()]


def _job(method: str, suite: Suite, number: int) -> Job:
    """The job of a round; the steps after a trial are timed."""
    seed = suite.workload.seed + (number if suite.seeds else 0)
    workload = dataclasses.replace(suite.workload, seed=seed)
    job = Job(
        method, suite.ranks, suite.steps, workload, patience(suite.ranks, suite.rate),
        per_host=suite.per_host,
    )  # fmt: skip
    codec = methods_.parse(method).codec
    trial = TRIAL * (codec == methods_.AUTO)
    if codec is not None and workload.device != "cpu":
        trial += GRAPHS
    return dataclasses.replace(job, steps=trial + suite.steps, untimed=trial) if trial else job


def merge(rounds: Sequence[Result]) -> Result:
    """Merge rounds: the timed steps of all, one after the other; the rest is the last round's.

    Failed rounds are dropped if another succeeded, and the label says so.
    """
    good = [each for each in rounds if each.error is None]
    if not good:
        return rounds[-1]
    lost = len(rounds) - len(good)
    label = good[-1].label + (f" ({lost} of {len(rounds)} rounds failed)" if lost else "")
    return dataclasses.replace(
        good[-1],
        label=label,
        warmup=0,
        seconds=[value for each in good for value in each.timed],
        identical=None if good[-1].identical is None else all(each.identical for each in good),
        tried=[plan for each in good for plan in each.tried],
        payload_bytes=_mean([each.payload_bytes for each in good]),
        wire_bytes=_mean([each.wire_bytes for each in good]),
        phases=_means([each.phases for each in good if each.phases is not None]),
        curves=[Curve(each.seconds[: len(each.losses)], each.losses) for each in good],
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _means(spent: Sequence[dict[str, float]]) -> dict[str, float] | None:
    if not spent:
        return None
    return {name: statistics.fmean(each[name] for each in spent) for name in spent[0]}


def describe(result: Result) -> str:
    """A line of progress for the user."""
    if result.error is not None:
        return f"{result.label}: failed: {result.error}"
    row = rows([result])[0]
    return f"{result.label}: {1e3 * row.median:.0f} ms a step, loss {row.loss:.3f}"


def predictions(results: Sequence[Result]) -> list[str]:
    """Lines on each plan that "auto" tried: its step, predicted and measured, and the error."""
    tried = [plan for result in results for plan in result.tried if plan["step_seconds"]]
    if not tried:
        return []
    head = ('tried by "auto"', "predicted ms", "step ms", "off", "")
    errors = [abs(off(plan)) for plan in tried]
    middle, worst = statistics.median(errors), max(errors)
    line = f"Predictions are off by {middle:.0%} in the median, at most {worst:.0%}."
    return ["", *markdown_table(head, map(prediction, tried)).splitlines(), "", line]


def prediction(plan: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a tried plan."""
    times = (f"{1e3 * plan[key]:.0f}" for key in ("predicted_seconds", "step_seconds"))
    return (plan["plan"], *times, f"{off(plan):+.0%}", plan["verdict"])


def off(plan: dict[str, Any]) -> float:
    """The relative error of a predicted step."""
    return float(plan["predicted_seconds"] / plan["step_seconds"] - 1)
