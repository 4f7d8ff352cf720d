"""Losses when Adam's v is frozen early, without compression: python -m bench.freeze gpt 40,150

For each workload, seed, course of the learning rate and number of steps: the loss against that of a
training in which v is never frozen, and by how much v had changed, bias corrected, from half of
these steps to the freeze: its sum, and its root by tensor (mean by elements, and largest). One
process averages the batches of two ranks.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bench import loss_workloads
from bench.loss_workloads import Batch, Workload
from hipress import optim
from hipress.model.rounding import total
from hipress.tools.run import jobs, lstm

Sums = NDArray[np.float64]  # of v, by tensor
LSTM = jobs.Workload(vocabulary=2000, width=128)
LAST = 20  # steps of which the mean loss counts where no data is held out


def _words(seed: int, rank: int, step: int) -> Batch:
    return (lstm.batch(loss_workloads._text(), replace(LSTM, seed=seed), rank, step),)


def _small_lstm(seed: int) -> nn.Module:
    return lstm.build(replace(LSTM, seed=seed))


ADAM = lstm.Training(partial(torch.optim.AdamW, lr=1e-3), inf)
WORKLOADS = {
    "gpt": loss_workloads.WORKLOADS["gpt"],
    "lstm": loss_workloads.WORKLOADS["lstm-adamw"],
    "lstm-128": replace(loss_workloads.WORKLOADS["lstm-adamw"], build=_small_lstm, batch=_words),
    "digits": replace(loss_workloads.WORKLOADS["digits"], training=ADAM),
}


@dataclass
class Training:
    """A model in training."""

    workload: Workload
    seed: int
    steps: int
    falls: bool  # True if the learning rate falls to zero
    model: nn.Module
    optimizer: optim.Adam | optim.AdamW

    def run(self, begin: int, end: int) -> list[float]:
        """Losses of these steps."""
        losses = []
        for step in range(begin, end):
            if self.falls:
                for group in self.optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * (1 - step / self.steps)
            parts = [self.workload.batch(self.seed, rank, step) for rank in range(2)]
            self.optimizer.zero_grad()
            loss = self.model(*map(torch.cat, zip(*parts, strict=True)))
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def sums(self) -> Sums:
        """Bias-corrected sums of v, by tensor."""
        group, states = self.optimizer.param_groups[0], self.optimizer.state
        correction = 1 - group["betas"][1] ** self.optimizer.steps
        return np.array([total(states[p]["exp_avg_sq"]) / correction for p in group["params"]])

    def score(self, losses: Sequence[float]) -> float:
        """The loss that counts."""
        if self.workload.held_out is None:
            return float(np.mean(losses[-LAST:]))
        with torch.no_grad():
            return float(np.mean([float(self.model(*b)) for b in self.workload.held_out()]))


def start(workload: Workload, seed: int, steps: int, *, falls: bool) -> Training:
    """A training before its first step."""
    model = workload.build(seed)
    optimizer = workload.training.averaged(model.parameters(), freeze="auto")
    assert isinstance(optimizer, optim.Adam | optim.AdamW)
    optimizer.freeze = None
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return Training(workload, seed, steps, falls, model, optimizer)


def compare(training: Training, freezes: Sequence[int]) -> list[tuple[int, float, str]]:
    """Loss by step of the freeze, as a share of that without, and the changes of v."""
    copies, sums, losses = {}, {}, []
    for begin, end in zip([0, *(edges := _edges(training.steps, freezes))], edges, strict=False):
        losses += training.run(begin, end)
        sums[end] = training.sums()
        if end in freezes:
            copies[end] = copy.deepcopy((training.model, training.optimizer))
    reference, outcomes = training.score(losses), []
    for at in freezes:
        model, optimizer = copies.get(at) or (training.model, training.optimizer)
        frozen = replace(training, model=model, optimizer=optimizer)
        optimizer.freeze_now()
        loss = frozen.score(frozen.run(at, training.steps))
        sizes = [parameter.numel() for parameter in model.parameters()]
        outcomes.append((at, loss / reference - 1, _changes(sums[at // 2], sums[at], sizes)))
    return outcomes


def _edges(steps: int, freezes: Sequence[int]) -> list[int]:
    return sorted({steps, *freezes, *(each // 2 for each in freezes)})


def _changes(before: Sums, after: Sums, sizes: Sequence[int]) -> str:
    roots = np.abs(np.sqrt(after / before) - 1)
    mean = np.average(roots, weights=sizes)
    sum_ = after.sum() / before.sum() - 1
    return f"v's sum {sum_:+.1%}, its root by tensor {mean:.1%}, at most {roots.max():.1%}"


def main() -> None:
    """Print a line for each training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("freezes", help="numbers of steps, such as 40,60,150")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    freezes = [int(each) for each in arguments.freezes.split(",")]
    for seed in range(1, 1 + arguments.seeds):
        for falls in (False, True):
            training = start(WORKLOADS[arguments.workload], seed, arguments.steps, falls=falls)
            course = "falling" if falls else "constant"
            for at, change, moved in compare(training, freezes):
                place = f"{arguments.workload} seed {seed}, {course} rate, frozen after {at} steps"
                print(f"{place}: loss {change:+.1%}; {moved}", flush=True)


if __name__ == "__main__":
    main()
