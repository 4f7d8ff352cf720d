"""The model that the demo trains, its optimizer and its batches: the same for every method."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hipress.demo.job import Workload


class LanguageModel(nn.Module):
    """Embedding, one LSTM layer, a linear layer back to words; returns the mean cross-entropy
    (nats per word)."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.embedding = nn.Embedding(workload.vocabulary, workload.width)
        self.lstm = nn.LSTM(workload.width, workload.width, batch_first=True)
        self.output = nn.Linear(workload.width, workload.vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, words: Tensor) -> Tensor:
        """`words`: int64 [batch, length + 1]; each predicts its successor."""
        hidden, _ = self.lstm(self.embedding(words[:, :-1]))
        scores = self.output(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(scores, words[:, 1:].flatten())


@dataclass(frozen=True)
class Training:
    """An optimizer, and the gradient norm that it is clipped to."""

    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    clip: float


OPTIMIZERS = {
    "sgd": Training(partial(torch.optim.SGD, lr=1.0), clip=0.25),
    "adamw": Training(partial(torch.optim.AdamW, lr=0.002), clip=1.0),
}


def take_device(workload: Workload, gpu: int) -> None:
    """Make a GPU, of those that are here, the current device, where the workload is for one."""
    if workload.device == "cuda":
        torch.cuda.set_device(gpu % torch.cuda.device_count())


def build(workload: Workload) -> LanguageModel:
    """The model with the weights of the workload's seed."""
    torch.manual_seed(workload.seed)
    return LanguageModel(workload).to(workload.device)


def batch(numbers: NDArray[np.int64], workload: Workload, rank: int, step: int) -> Tensor:
    """A rank's sequences for a step, int64 [batch, length + 1] on its device: drawn by (seed, rank,
    step) alone."""
    random = np.random.default_rng((workload.seed, rank, step))
    starts = random.integers(0, len(numbers) - workload.length - 1, workload.batch)
    rows = starts[:, None] + np.arange(workload.length + 1)
    words = torch.from_numpy(np.minimum(numbers[rows], workload.vocabulary - 1))
    return words.to(workload.device)
