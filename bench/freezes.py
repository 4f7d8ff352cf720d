"""Variants of training after the freeze of Adam's second moments, with momentum at one bit.

    python -m bench.freezes gpt 200 1 freeze=0.15 refresh=16 refresh=16,local=0.5 follow=1

Each argument after workload, steps and seed is a variant: fields of `Variant`, separated by commas.
Ranks are imitated in one process, with codecs and feedback as in bench.losses; losses are compared
with its fp32 of the same seed. hipress offers none of the variants: docs/losses.md has the figures.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from bench.commands import now, refusing
from bench.loss_cells import CELLS, FP32, read
from bench.loss_ranks import Compressed, evaluate
from bench.loss_workloads import ALL, Workload
from hipress.demo.methods import parse
from hipress.demo.report import FINAL

RESULTS = CELLS.parent / "freezes.jsonl"
SETTLING = 20  # steps after the freeze, whose mean size is the reference of `follow`
KEPT = 0.95  # share of a running size that a step keeps
LONGEST = 16  # steps between two averages, as in 0/1 Adam
STALE = 50  # steps of b2 that a refresh forgets, at most


@dataclass(frozen=True)
class Variant:
    """A way to go on after the freeze; by default that of hipress.optim."""

    freeze: float = 0.15  # share of the steps; 0: one bit from the first step on, as in 0/1 Adam
    floor: float = 0.01  # least v, as a share of its tensor's mean; 0: none
    follow: int = 0  # 1: a tensor's divisor follows the size of its momentum
    refresh: int = 0  # v is refreshed in full at intervals that double after this many; 0: never
    clip: float = 1.0  # times the norm that each rank's gradient is clipped to after the freeze
    local: float = 1.0  # share of the steps after which ranks average at intervals that double

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse text such as `refresh=16,local=0.5`. Raises ValueError."""
        kinds = {each.name: type(each.default) for each in fields(cls)}
        pairs = [pair.partition("=")[::2] for pair in text.split(",")]
        for name, _ in pairs:
            if name not in kinds:
                raise ValueError(f"unknown {name!r} in {text!r}; choose from: {', '.join(kinds)}")
        return cls(**{name: kinds[name](value) for name, value in pairs})  # type: ignore[misc]


def doubling(start: int, every: int, stop: int, longest: int = 1 << 30) -> Iterator[int]:
    """Steps from `start` on, at an interval that doubles after each `every` of them."""
    at, count = start, 0
    while at < stop:
        yield at
        count += 1
        at += min(longest, 1 << (count // every))


class Adam:
    """AdamW of one flat vector, with ranks' averages of the momentum."""

    def __init__(self, workload: Workload, model: nn.Module, steps: int, variant: Variant) -> None:
        made = workload.training.make(model.parameters()).defaults
        self.lr, self.decay, self.eps = made["lr"], made["weight_decay"], made["eps"]
        self.b1, self.b2 = made["betas"]
        self._falls, self._variant, self._steps = workload.decays, variant, steps
        self.lengths = [p.numel() for p in model.parameters()]
        self.m, self.v = torch.zeros(sum(self.lengths)), torch.zeros(sum(self.lengths))
        self._known = 0  # steps whose gradients are in v
        self._roots: dict[bool, Tensor] = {}  # by whether v is frozen
        self._sizes: list[Tensor] = []
        self._size = torch.zeros(len(self.lengths))

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return float(self.lr) * (1 - step / self._steps if self._falls else 1)

    def see(self, gradient: Tensor, step: int) -> None:
        """Put a gradient into v, for all steps since the last one."""
        missed = step + 1 - self._known
        kept = self.b2 ** min(missed, STALE)
        self.v.mul_(kept).addcmul_(gradient, gradient, value=1 - kept)
        self._known = step + 1
        self._roots.clear()

    def denominator(self, *, frozen: bool) -> Tensor:
        """Divisor of the momentum."""
        if frozen not in self._roots:
            v = self.v / (1 - self.b2**self._known)
            for piece in self._pieces(v) if frozen and self._variant.floor else ():
                some = piece[piece > 0]
                mean = some.mean() if len(some) else v[v > 0].mean()
                piece.clamp_(min=float(self._variant.floor * mean))
            self._roots[frozen] = v.sqrt_().add_(self.eps)
        return self._roots[frozen]

    def scale(self, move: Tensor) -> None:
        """With `follow`, divide by the growth of each tensor's momentum since the freeze."""
        if not self._variant.follow:
            return
        now = torch.stack([piece.square().mean() for piece in self._pieces(self.m)])
        if len(self._sizes) < SETTLING:
            self._sizes.append(now)
            self._size = torch.stack(self._sizes).mean(0)
            return
        self._size = KEPT * self._size + (1 - KEPT) * now
        grown = (self._size / torch.stack(self._sizes).mean(0)).sqrt().clamp(0.1, 10.0)
        for piece, factor in zip(self._pieces(move), grown, strict=True):
            piece.div_(factor)

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of the tensors."""
        return torch.split(flat, self.lengths)


class Training:
    """A model's training by a variant."""

    def __init__(self, workload: Workload, seed: int, steps: int, variant: Variant) -> None:
        self._workload, self._seed, self._steps = workload, seed, steps
        self._model = workload.build(seed)
        self._adam = Adam(workload, self._model, steps, variant)
        self._start = nn.utils.parameters_to_vector(self._model.parameters()).detach()
        self._frozen_at, self._clip = round(variant.freeze * steps), variant.clip
        refreshed = doubling(self._frozen_at, variant.refresh, steps) if variant.refresh else ()
        local = round(variant.local * steps)
        quarter = max(1, (steps - local) // 4)
        self._refreshed = {*refreshed}
        self._averaged = {*range(local), *doubling(local, quarter, steps, LONGEST)}
        self._meet()
        self._losses: list[float] = []
        self._sent = 0.0

    def run(self) -> tuple[float, float]:
        """The loss that counts, and bytes that a rank sends."""
        with ExitStack() as stack:
            before, after = (
                stack.enter_context(
                    Compressed(
                        self._model, parse(f"hipress:{codec}"), self._workload.ranks, self._seed
                    )
                )
                for codec in ("int4_group", "onebit_fine")
            )
            for step in range(self._steps):
                mine = [self._gradient(x, rank, step) for rank, x in enumerate(self._ranks)]
                if step < self._frozen_at:
                    self._by_gradients(mine, step, before)
                else:
                    self._by_momentum(mine, step, after)
        nn.utils.vector_to_parameters(self._start, self._model.parameters())
        held_out, last = (
            self._workload.held_out,
            statistics.fmean(self._losses[-len(self._ranks) * FINAL :]),
        )
        return (evaluate(self._model, held_out()) if held_out else last), self._sent

    def _gradient(self, values: Tensor, rank: int, step: int) -> Tensor:
        """Gradient of a rank with these parameters."""
        nn.utils.vector_to_parameters(values, self._model.parameters())
        self._model.zero_grad()
        loss = self._model(*self._workload.batch(self._seed, rank, step))
        loss.backward()
        self._losses.append(float(loss.item()))
        return torch.cat([p.grad.flatten() for p in self._model.parameters() if p.grad is not None])

    def _by_gradients(self, gradients: Sequence[Tensor], step: int, average: Compressed) -> None:
        adam, lr = self._adam, self._adam.rate(step)
        self._sent += average(gradients, step)
        gradient = self._clipped(gradients[0])
        adam.m.mul_(adam.b1).add_(gradient, alpha=1 - adam.b1)
        adam.see(gradient, step)
        corrected = adam.m / (1 - adam.b1 ** (step + 1))
        self._start.mul_(1 - lr * adam.decay)
        self._start.addcdiv_(corrected, adam.denominator(frozen=False), value=-lr)
        self._meet()

    def _by_momentum(self, gradients: Sequence[Tensor], step: int, average: Compressed) -> None:
        """A step of each rank, and the average of all if it is due."""
        adam, lr = self._adam, self._adam.rate(step)
        if step in self._refreshed:
            whole = torch.stack([*gradients]).mean(0)
            adam.see(self._clipped(whole), step)
            self._sent += 4 * len(whole)
        root = adam.denominator(frozen=True)
        rate = lr / (1 - adam.b1 ** (step + 1))
        self._rates += rate
        self._start.mul_(1 - lr * adam.decay)
        for x, m, walked, g in zip(
            self._ranks, self._moments, self._walked, gradients, strict=True
        ):
            m.mul_(adam.b1).add_(self._clipped(g, self._clip), alpha=1 - adam.b1)
            walked.add_(m, alpha=rate)
            x.mul_(1 - lr * adam.decay).addcdiv_(m, root, value=-rate)
        if step in self._averaged:
            self._average(step, root, average)

    def _average(self, step: int, root: Tensor, average: Compressed) -> None:
        for walked in self._walked:
            walked.div_(self._rates)
        self._sent += average(self._walked, step)
        self._adam.m.copy_(self._walked[0])
        move = self._adam.m / root
        self._adam.scale(move)
        self._start.sub_(move, alpha=self._rates)
        self._meet()

    def _meet(self) -> None:
        """Give all ranks the same parameters and momentum."""
        self._ranks = [self._start.clone() for _ in range(self._workload.ranks)]
        self._moments = [self._adam.m.clone() for _ in range(self._workload.ranks)]
        self._walked = [torch.zeros_like(self._start) for _ in self._ranks]
        self._rates = 0.0

    def _clipped(self, gradient: Tensor, factor: float = 1.0) -> Tensor:
        most = factor * self._workload.training.clip
        return gradient * min(1.0, most / (float(gradient.norm()) + 1e-6))


def main(
    workload: Annotated[str, typer.Argument(help="Workload of bench.losses, with AdamW.")],
    steps: int,
    seed: int,
    variant: list[str],
    output: Annotated[Path, typer.Option(help="JSON lines of results.")] = RESULTS,
) -> None:
    """Train with each variant, and print the loss."""
    with refusing():
        variants = [Variant.parse(each) for each in variant]
        if workload not in ALL or ALL[workload].kind != "adam":
            raise ValueError(f"{workload!r} is no workload of bench.losses with AdamW")
    torch.set_num_threads(1)
    plain = [c.loss for c in read() if c.key[:4] == (workload, FP32, seed, steps)]
    numel = sum(p.numel() for p in ALL[workload].build(seed).parameters())
    for each in variants:
        begun = time.perf_counter()
        loss, sent = Training(ALL[workload], seed, steps, each).run()
        found = {
            "workload": workload, "steps": steps, "seed": seed, **asdict(each),
            "loss": round(loss, 5), "difference": round(loss / plain[0] - 1, 5) if plain else None,
            "bits": round(8 * sent / steps / numel, 3),
            "seconds": round(time.perf_counter() - begun, 1), "date": now(),
        }  # fmt: skip
        with output.open("a") as file:
            file.write(json.dumps(found) + "\n")
        typer.echo(found)


if __name__ == "__main__":
    typer.run(main)
