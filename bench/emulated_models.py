"""Models that train on emulated hosts, to test predicted steps.

These are the demo's language model, the same with a rank that is late in each backward pass, and a
model of one large tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hipress.tools.run import corpus, lstm
from hipress.tools.run.jobs import Workload
from hipress.tools.run.lstm import LanguageModel

__all__ = ["KINDS", "LATE", "TRAINED", "Huge", "LateModel", "huge", "late", "on_meta"]

TRAINED = Workload()
LATE = 0.05  # seconds by which the last gradients of rank 1 are late
WIDE, HIGH, BATCH = 4096, 2048, 8  # of the large tensor, and its inputs
#: models by name, as hipress.tools.run.lstm.make takes them
KINDS = {"lstm": "lstm", "late": "bench.emulated_models:late", "huge": "bench.emulated_models:huge"}


class _Late(torch.autograd.Function):
    """The identity; its backward pass keeps a core busy for some seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Returns its input."""
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Compute nothing, for `seconds`."""
        end = time.perf_counter() + ctx.seconds
        while time.perf_counter() < end:
            pass
        return grad, None


class LateModel(LanguageModel):
    """A language model whose LSTM and embedding have their gradients `seconds` later."""

    def forward(self, words: Tensor, seconds: float = 0.0) -> Tensor:
        """words: int64 [batch, length + 1], as LanguageModel takes them."""
        hidden, _ = self.lstm(self.embedding(words[:, :-1]))
        late: Tensor = _Late.apply(hidden, seconds)  # type: ignore[no-untyped-call]
        scores = self.output(late).flatten(0, 1)
        return nn.functional.cross_entropy(scores, words[:, 1:].flatten())


class Huge(nn.Module):
    """A model with nearly all elements in one tensor; all ranks wait for that one's owner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, HIGH)

    def forward(self, x: Tensor) -> Tensor:
        """x: float32 [batch, WIDE]; returns a loss."""
        loss: Tensor = self.layer(x).square().mean()
        return loss


Made = tuple[nn.Module, Callable[[int, int], tuple[Any, ...]]]


def late() -> Made:
    """A late model; its inputs make only rank 1 late."""
    numbers = np.load(str(corpus.prepare()), mmap_mode="r")

    def inputs(rank: int, step: int) -> tuple[Tensor, float]:
        return lstm.batch(numbers, TRAINED, rank, step), LATE * (rank == 1)

    return LateModel(TRAINED), inputs


def huge() -> Made:
    """A model of one large tensor; its inputs are noise."""

    def inputs(rank: int, step: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return (torch.randn(BATCH, WIDE, generator=generator),)

    return Huge(), inputs


def on_meta(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of this name and its inputs, for hipress.tools.models.roofline."""
    if kind == "huge":
        return Huge(), (torch.zeros(BATCH, WIDE),)
    words = torch.zeros((TRAINED.batch, TRAINED.length + 1), dtype=torch.long)
    return LanguageModel(TRAINED), (words,)
