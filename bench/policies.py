"""GraVAC and Accordion on a convolutional net: their ratios over time, their cost and savings.

    python -m bench.policies

Two emulated hosts on slow links train `bench.losses`' net on digits under SGD with momentum, whose
rate falls twice, as in both papers: uncompressed, by `topk` at a low and at a high compression, and
by policies between these. Takes a few minutes; writes policies.json and policies.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import ranks
from bench.commands import RESULTS, refusing
from bench.netns import Network, require
from hipress.tools.refusals import check_output
from hipress.tools.run.figures import markdown_table

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

HOSTS = 2
EPOCH = 22  # steps: 1437 images, 64 a step
STEPS = 18 * EPOCH
FALLS = (STEPS // 2, STEPS * 3 // 4)  # steps at which the rate becomes a tenth
RATIOS = (0.1, 0.01, 0.001)
METHODS = {
    "fp32": "DDP fp32",
    "low": f"`topk`, ratio {RATIOS[0]}",
    "high": f"`topk`, ratio {RATIOS[1]}",
    "gravac": "`GraVAC`, ratios " + ", ".join(map(str, RATIOS)),
    "accordion": f"`Accordion`, {RATIOS[0]} and {RATIOS[1]}",
}
FEW = 0.005  # of the elements: biases, which are never compressed
PARTS = 6  # parts of a training, each with its shares by ratio


@dataclass(frozen=True)
class Run:
    """A training."""

    method: str
    seed: int
    loss: float  # of the images that are held out
    accuracy: float
    seconds: float  # of all steps
    sent: float  # bytes of rank 0
    shares: list[tuple[int, dict[str, float]]]  # from a step on, of the elements by ratio

    def by_step(self) -> list[dict[str, float]]:
        """Shares of the elements by ratio ("": uncompressed), in each step."""
        ends = [*(first for first, _ in self.shares[1:]), STEPS]
        return [
            shares
            for (first, shares), end in zip(self.shares, ends, strict=True)
            for _ in range(first, end)
        ]


def wrapped(method: str, module: nn.Module, optimizer: Any) -> DistributedDataParallel:
    """A module wrapped by one of METHODS."""
    from torch.nn.parallel import DistributedDataParallel

    import hipress

    low, high, _ = RATIOS
    if method == "fp32":
        return DistributedDataParallel(module)
    if method in ("low", "high"):
        return hipress.wrap(module, "topk", ratio={"low": low, "high": high}[method])
    if method == "gravac":
        return hipress.wrap(module, policy=hipress.GraVAC("topk", RATIOS, window=EPOCH))
    policy = hipress.Accordion("topk", low, high, window=EPOCH, optimizer=optimizer)
    return hipress.wrap(module, policy=policy)


def rank(method: str, seed: int) -> None:
    """Train on this host, and report the results at the end."""
    import torch
    import torch.distributed as dist
    from torch.optim.lr_scheduler import MultiStepLR

    from bench.loss_workloads import WORKLOADS

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = WORKLOADS["digits"]
    module = workload.build(seed)
    optimizer = workload.training.make(module.parameters())
    schedule = MultiStepLR(optimizer, FALLS)
    ddp = wrapped(method, module, optimizer)
    seconds = 0.0
    shares: list[tuple[int, dict[str, float]]] = []
    for step in range(STEPS):
        batch = workload.batch(seed, dist.get_rank(), step)
        start = time.perf_counter()
        optimizer.zero_grad()
        ddp(*batch).backward()
        optimizer.step()
        seconds += time.perf_counter() - start
        schedule.step()
        now = _shares(method, ddp)
        if not shares or shares[-1][1] != now:
            shares.append((step, now))
    loss, accuracy = _judged(module)
    sent = _sent(method, ddp)
    ranks.tell(**asdict(Run(method, seed, loss, accuracy, seconds, sent, shares)))
    dist.destroy_process_group()


def _judged(module: nn.Module) -> tuple[float, float]:
    """Loss and accuracy on the held-out data."""
    import torch

    from bench.loss_workloads import WORKLOADS

    held_out = WORKLOADS["digits"].held_out
    assert held_out is not None
    ((images, digits),) = held_out()
    with torch.inference_mode():
        loss = float(module(images, digits))
        scores = module.get_submodule("layers")(images)
    right = scores.argmax(1) == digits
    return loss, float(right.float().mean())


def _shares(method: str, ddp: DistributedDataParallel) -> dict[str, float]:
    """Shares of the elements by ratio."""
    import hipress

    if method not in ("gravac", "accordion"):
        return {}
    decisions = hipress.report(ddp).decisions
    total = sum(each.numel for each in decisions)
    by_kind: dict[str, float] = {}
    for each in decisions:
        name = "" if each.codec is None else str(RATIOS[int(each.codec.split()[-1])])
        by_kind[name] = by_kind.get(name, 0.0) + each.numel / total
    return by_kind


def _sent(method: str, ddp: DistributedDataParallel) -> float:
    import hipress
    from hipress.reporting.measured import all_reduce_bytes

    if method == "fp32":
        return STEPS * all_reduce_bytes(sum(p.numel() for p in ddp.parameters()), HOSTS)
    return hipress.report(ddp).bytes_sent


def text(runs: Sequence[Run]) -> str:
    """The report: costs, gains, and the ratios over time."""
    return "\n".join(
        [
            markdown_table(
                ("", "loss", "accuracy", "MB sent", "seconds"),
                [_row(name, [r for r in runs if r.method == key]) for key, name in METHODS.items()],
            ),
            "",
            markdown_table(
                ("elements by ratio", *(f"{n + 1}/{PARTS}" for n in range(PARTS))),
                [row for key in ("gravac", "accordion") for row in _parts(key, runs)],
            ),
        ]
    )


def _row(name: str, runs: Sequence[Run]) -> tuple[str, ...]:
    def mean(values: Iterator[float]) -> float:
        return statistics.fmean(values)

    return (
        name, f"{mean(r.loss for r in runs):.3f}", f"{mean(r.accuracy for r in runs):.1%}",
        f"{mean(r.sent for r in runs) / 1e6:.1f}", f"{mean(r.seconds for r in runs):.1f}",
    )  # fmt: skip


def _parts(method: str, runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """A line for each ratio of a policy: its share in each part of the training."""
    own = [run for run in runs if run.method == method]
    for ratio in ("", *map(str, RATIOS)):
        every = [[step.get(ratio, 0.0) for step in run.by_step()] for run in own]
        steps = [statistics.fmean(values) for values in zip(*every, strict=True)]
        if max(steps) > FEW:
            size = len(steps) / PARTS
            cut = [steps[round(n * size) : round((n + 1) * size)] for n in range(PARTS)]
            shares = (f"{statistics.fmean(part):.0%}" for part in cut)
            yield (f"`{METHODS[method].split('`')[1]}`, {ratio or 'uncompressed'}", *shares)


def main(
    rate: Annotated[str, typer.Option(help="Speed of emulated links.")] = "100mbit",
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 3,
    output: Annotated[Path, typer.Option(help="Folder for JSON and table.")] = RESULTS,
) -> None:
    """Train with every method."""
    with refusing():
        require(HOSTS, rate)
        check_output(output)
    runs = []
    with Network(HOSTS, rate) as network:
        for seed in range(1, seeds + 1):
            for method in METHODS:
                (figures,) = ranks.run_module(network, "bench.policies", [method, str(seed)])
                runs.append(Run(**figures))
                print(f"seed {seed} {' | '.join(_row(METHODS[method], runs[-1:]))}")
    title = f"Policies, {HOSTS} hosts at {rate}"
    data = [asdict(run) for run in runs]
    ranks.record(output, "bench.policies", title, text(runs), rate=rate, runs=data)


if __name__ == "__main__":
    ranks.run(main, rank)
