"""The models of the demo and the cluster benchmark: an LSTM, or the user's own."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hipress import optim
from hipress.tools.run.jobs import LSTM, Workload


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
        scores = self.output(hidden).float().flatten(0, 1)  # weights may be of 16 bits
        return nn.functional.cross_entropy(scores, words[:, 1:].flatten())


@dataclass(frozen=True)
class Training:
    """An optimizer, and the norm to which gradients are clipped."""

    make: partial[Any]  # of parameters: an optimizer of torch.optim
    clip: float

    def averaged(self, parameters: Iterable[nn.Parameter], freeze: int | str) -> optim.Averaging:
        """The optimizer of hipress.optim of the same name, which clips for itself."""
        kind: Any = getattr(optim, self.make.func.__name__)
        frozen = {"freeze": freeze} if issubclass(kind, optim.Adam | optim.AdamW) else {}
        clip = self.clip if isfinite(self.clip) else None
        optimizer: optim.Averaging = kind(parameters, max_norm=clip, **self.make.keywords, **frozen)
        return optimizer


@dataclass(frozen=True)
class Task:
    """A model whose output is a loss, and its inputs."""

    module: nn.Module
    inputs: Callable[[int, int], tuple[Any, ...]]  # rank, step -> arguments of the module
    training: Training

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Loss of a rank's batch. module: the task's own, or its wrapper."""
        out = module(*self.inputs(rank, step))
        loss: Tensor = getattr(out, "loss", out)
        return loss


OPTIMIZERS = {
    "sgd": Training(partial(torch.optim.SGD, lr=1.0), clip=0.25),
    "adamw": Training(partial(torch.optim.AdamW, lr=0.002), clip=1.0),
}


def take_device(workload: Workload, gpu: int) -> None:
    """Make one of this machine's GPUs the current device, if the workload is for GPUs."""
    if workload.device == "cuda":
        torch.cuda.set_device(gpu % torch.cuda.device_count())


def build(workload: Workload) -> LanguageModel:
    """The model with the weights of the workload's seed."""
    torch.manual_seed(workload.seed)
    return LanguageModel(workload).to(workload.device)


def batch(numbers: NDArray[np.int64], workload: Workload, rank: int, step: int) -> Tensor:
    """A rank's sequences for a step: int64 [batch, length + 1] on its device, drawn by (seed, rank,
    step) alone."""
    random = np.random.default_rng((workload.seed, rank, step))
    starts = random.integers(0, len(numbers) - workload.length - 1, workload.batch)
    rows = starts[:, None] + np.arange(workload.length + 1)
    words = torch.from_numpy(np.minimum(numbers[rows], workload.vocabulary - 1))
    return words.to(workload.device)


#: for a model of the user's own
USUAL = {
    "sgd": Training(partial(torch.optim.SGD, lr=0.01), clip=1.0),
    "adamw": Training(partial(torch.optim.AdamW, lr=0.001), clip=1.0),
}


def make(workload: Workload, corpus: str) -> Task:
    """The workload's model and inputs. corpus: .npy file of word numbers, for the LSTM.

    A model of the user is package.module:function, which returns (module, inputs):
    `inputs(rank, step)` returns a tensor or a tuple of arguments, and the module returns a scalar
    loss, or an object with one as `.loss`. Raises ValueError for other functions.
    """
    if workload.model == LSTM:
        numbers = np.load(corpus, mmap_mode="r")
        draw = partial(batch, numbers, workload)
        training = OPTIMIZERS[workload.optimizer]
        return Task(build(workload), lambda rank, step: (draw(rank, step),), training)
    torch.manual_seed(workload.seed)
    module, inputs = _own(workload.model)
    on_device = partial(_place, inputs, torch.device(workload.device))
    return Task(module.to(workload.device), on_device, USUAL[workload.optimizer])


def _own(name: str) -> tuple[nn.Module, Callable[[int, int], Any]]:
    where, _, function = name.partition(":")
    try:
        result = getattr(importlib.import_module(where), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model {name!r}: {type(error).__name__}: {error}") from error
    match result:
        case (nn.Module() as module, inputs) if callable(inputs):
            return module, inputs
    raise ValueError(
        f"model {name!r}: expected (module, inputs), where inputs(rank, step) gives the module's "
        f"arguments; found {type(result).__name__}"
    )


def _place(
    inputs: Callable[[int, int], Any], device: torch.device, rank: int, step: int
) -> tuple[Any, ...]:
    values = inputs(rank, step)
    arguments = values if isinstance(values, tuple) else (values,)
    return tuple(each.to(device) if isinstance(each, Tensor) else each for each in arguments)
