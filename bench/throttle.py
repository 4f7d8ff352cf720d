"""A link that becomes slow while "auto" trains, and fast again: python -m bench.throttle

Two emulated hosts train the demo's workload. The links are throttled from one step to a later one.
The results are the numbers of steps until the plan was looked at again and until one was kept, the
times of a step before and after, and the difference of the losses from those of an undisturbed
training. Takes a few minutes; writes throttle.json and throttle.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench import ranks
from bench.commands import RESULTS, refusing
from bench.losses import smoothed
from bench.netns import Network, require
from hipress.tools.demo_command import trained_by
from hipress.tools.refusals import check_output
from hipress.tools.run.figures import markdown_table

HOSTS = 2
AIM = 100  # steps until the plan is looked at again
LAST = 20  # steps before a change whose median is a step's time


@dataclass(frozen=True)
class Step:
    """The steps of rank 0."""

    seconds: float
    loss: float
    trying: bool  # whether plans were being tried when it was over
    plan: str  # that the last trial kept, else ""


@dataclass(frozen=True)
class Change:
    """The reaction to a change of the links' rate, in steps after it."""

    rate: str
    looked: int | None  # until plans were tried; None: never
    kept: int | None  # until one was kept
    plan: str
    before: float  # seconds of a step
    after: float


def changes(steps: Sequence[Step], at: Mapping[int, str]) -> list[Change]:
    """A reaction for each change of the links."""
    ends = [*list(at)[1:], len(steps)]
    return [
        _change(rate, steps[:first], steps[first:end])
        for (first, rate), end in zip(at.items(), ends, strict=True)
    ]


def _change(rate: str, before: Sequence[Step], steps: Sequence[Step]) -> Change:
    looked = next((n for n, each in enumerate(steps) if each.trying), None)
    settled = None
    if looked is not None:
        settled = next((n for n, each in enumerate(steps) if n > looked and not each.trying), None)
    return Change(rate, looked, settled, steps[-1].plan, _median(before), _median(steps))


def _median(steps: Sequence[Step]) -> float:
    return statistics.median(each.seconds for each in steps[-LAST:])


def apart(one: Sequence[Step], other: Sequence[Step]) -> float:
    """The largest relative difference between two curves of losses, in means of ten steps."""
    curves = [smoothed([each.loss for each in steps]) for steps in (one, other)]
    return max((abs(a / b - 1) for a, b in zip(*curves, strict=True)), default=0.0)


def train(optimizer: str, rate: str, steps: int, at: Mapping[int, str]) -> list[Step]:
    """A training, and the links' rates from some steps on. NetworkError if it fails."""
    taken_steps: list[Step] = []
    with Network(HOSTS, rate) as network:
        for step in ranks.run_module(network, "bench.throttle", [optimizer, str(steps)]):
            taken_steps.append(Step(**step))
            if len(taken_steps) in at:
                network.throttle(at[len(taken_steps)])
    return taken_steps


def text(changed: Sequence[Change], disturbance: float) -> str:
    """The lines of the report."""
    head = ("links", "looked again after", "kept one after", "plan", "step before, ms", "after, ms")
    rows = [
        (c.rate, _steps(c.looked), _steps(c.kept), c.plan, f"{1e3 * c.before:.0f}",
         f"{1e3 * c.after:.0f}")
        for c in changed
    ]  # fmt: skip
    met = all(c.looked is not None and c.looked <= AIM for c in changed)
    return "\n".join(
        [
            markdown_table(head, rows), "",
            f"- looked at again within {AIM} steps of each change: {'met' if met else 'MISSED'}",
            f"- losses, means of ten steps: at most {disturbance:.1%} from those at a steady rate",
        ]
    )  # fmt: skip


def _steps(count: int | None) -> str:
    return "never" if count is None else f"{count} steps"


def rank(optimizer: str, steps: int) -> None:
    """Train on this host, and report each step."""
    import torch
    import torch.distributed as dist

    from hipress.tools.run import corpus, lstm, methods, worker
    from hipress.tools.run.jobs import Workload
    from hipress.tools.run.synchronize import synchronize

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload, method = Workload(optimizer=optimizer), f"hipress:auto:optimizer={optimizer}"
    task = lstm.make(workload, str(corpus.prepare()))
    synchronized = synchronize(task.module, methods.parse(method), task.training)
    trainer = worker.Trainer(task, dist.get_rank(), synchronized)
    for step in range(steps):
        trainer.step(step)
        verdicts = {each["verdict"]: each["plan"] for each in synchronized.tried()}
        report = Step(
            round(trainer.seconds[-1], 4), round(trainer.losses[-1], 4), "being tried" in verdicts,
            verdicts.get("kept", ""),
        )  # fmt: skip
        ranks.tell(**asdict(report))
    dist.destroy_process_group()


def main(
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    fast: Annotated[str, typer.Option(help="Speed of links.")] = "1gbit",
    slow: Annotated[str, typer.Option(help="Speed of throttled links.")] = "100mbit",
    each: Annotated[
        int, typer.Option(help="Steps before, at and after the throttle.", min=1)
    ] = 150,
    output: Annotated[Path, typer.Option(help="Folder for JSON and table.")] = RESULTS,
) -> None:
    """Throttle links while auto trains."""
    with refusing():
        optimizer = trained_by(optimizer)
        for rate in (fast, slow):
            require(HOSTS, rate)
        check_output(output)
    at = {each: slow, 2 * each: fast}
    throttled = train(optimizer, fast, 3 * each, at)
    steady = train(optimizer, fast, 3 * each, {})
    changed, off = changes(throttled, at), apart(throttled, steady)
    ranks.record(
        output, "bench.throttle", "Links throttled while auto trains", text(changed, off),
        changes=[asdict(c) for c in changed], losses_apart=off,
        throttled=[asdict(s) for s in throttled], steady=[asdict(s) for s in steady],
    )  # fmt: skip


if __name__ == "__main__":
    ranks.run(main, rank)
