"""The workloads of `bench.losses`: models that learn something in seconds on one core.

Their data comes with Python and scikit-learn. A seed decides the weights, and the batches of each
rank and step. The loss that counts is that of batches that are never trained on, the same for all
seeds and methods; for the LSTM, which sees a twentieth of its text in 200 steps, it is that of the
last batches, as in `hipress demo`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hipress import optim
from hipress.optim.optimizer_kinds import PLAIN_SGD
from hipress.tools.run import corpus, jobs, lstm

Batch = tuple[Tensor, ...]
HELD_OUT = 100_000  # words at the end of the text
LSTM = jobs.Workload()  # the demo's
GPT = jobs.Workload(vocabulary=2000, width=64, batch=4, length=32)


@dataclass(frozen=True)
class Workload:
    """A model, its data and its optimizer."""

    about: str
    kind: str  # of optimizer, one of hipress.optim.optimizer_kinds.KINDS
    build: Callable[[int], nn.Module]  # by seed; the module returns the mean loss of a batch
    batch: Callable[[int, int, int], Batch]  # by seed, rank and step
    held_out: Callable[[], list[Batch]] | None  # None: the last batches of the training
    training: lstm.Training
    data: Callable[[], str]  # a short hash of its training data
    ranks: int = 2
    decays: bool = False  # whether the rate falls to zero, step by step: the end is less of a draw


class GPT2(nn.Module):
    """nanoGPT's shape, smaller (4 layers, 4 heads, tied embeddings); returns the mean cross-entropy
    (nats per word)."""

    def __init__(self, workload: jobs.Workload, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        width = workload.width
        self.words = nn.Embedding(workload.vocabulary, width)
        self.places = nn.Embedding(workload.length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        for each in (self.words, self.places):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """`words`: int64 [batch, length + 1]; each predicts its successor."""
        hidden = self.words(words[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        scores = nn.functional.linear(self.norm(hidden), self.words.weight)
        return nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


class ConvNet(nn.Module):
    """Three convolutions and two linear layers for images of 8 by 8; returns the cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, images: Tensor, digits: Tensor) -> Tensor:
        """`images`: float32 [batch, 1, 8, 8] in 0 to 1; `digits`: int64 [batch]."""
        return nn.functional.cross_entropy(self.layers(images), digits)


@cache
def _text() -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = np.load(corpus.prepare())
    return numbers


def _words(seed: int, rank: int, step: int, sequences: int = GPT.batch) -> Batch:
    load = replace(GPT, seed=seed, batch=sequences)
    return (lstm.batch(_text()[:-HELD_OUT], load, rank, step),)


def _held_out_words() -> list[Batch]:
    return [(lstm.batch(_text()[-HELD_OUT:], GPT, 0, step),) for step in range(40)]


def _demo_words(seed: int, rank: int, step: int) -> Batch:
    return (lstm.batch(_text(), replace(LSTM, seed=seed), rank, step),)


def _lstm(seed: int) -> nn.Module:
    return lstm.build(replace(LSTM, seed=seed))


def _gpt(seed: int, width: int = GPT.width) -> nn.Module:
    torch.manual_seed(seed)
    return GPT2(replace(GPT, width=width))


def gpt() -> tuple[nn.Module, Callable[[int, int], Batch]]:
    """The GPT and its inputs by rank and step, for `hipress bench --model`."""
    return _gpt(1), partial(_words, 1)


def _gpt_of_matrices(seed: int) -> nn.Module:
    """A GPT without biases and without weights of norms: torch's Muon takes matrices only."""
    built = _gpt(seed)
    for module in built.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() < 2:
                module.register_parameter(name, None)
    return built


def _conv_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ConvNet()


@cache
def _digits() -> Batch:
    """Images and digits in one fixed random order; the last 360 are held out."""
    from sklearn.datasets import load_digits  # not above: only this workload needs it

    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    pixels = torch.from_numpy(images[order] / 16).float().view(-1, 1, 8, 8)
    return pixels, torch.from_numpy(digits[order].astype(np.int64))


def _some_digits(seed: int, rank: int, step: int) -> Batch:
    images, digits = _digits()
    drawn = np.random.default_rng((seed, rank, step)).integers(0, len(digits) - 360, 32)
    return images[drawn], digits[drawn]


def _held_out_digits() -> list[Batch]:
    images, digits = _digits()
    return [(images[-360:], digits[-360:])]


def _hash_of_text() -> str:
    return _hash(_text())


def _hash_of_digits() -> str:
    return _hash(*(each.numpy() for each in _digits()))


def _hash(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:8]


WORKLOADS = {
    "digits": Workload(
        "convolutional net on digits, SGD lr .05 to 0, momentum .9",
        "sgd",
        _conv_net,
        _some_digits,
        _held_out_digits,
        lstm.Training(partial(torch.optim.SGD, lr=0.05, momentum=0.9), inf),
        _hash_of_digits,
        decays=True,
    ),
    "gpt": Workload(
        "GPT on source text, AdamW lr .001 to 0, clipping 1",
        "adam",
        _gpt,
        _words,
        _held_out_words,
        lstm.Training(partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99)), 1.0),
        _hash_of_text,
        decays=True,
    ),
    "lstm-adamw": Workload(
        "LSTM on source text, AdamW lr .002, clipping 1",
        "adam",
        _lstm,
        _demo_words,
        None,
        lstm.OPTIMIZERS["adamw"],
        _hash_of_text,
    ),
    "lstm-sgd": Workload(
        "LSTM on source text, SGD lr 1, clipping .25",
        PLAIN_SGD,
        _lstm,
        _demo_words,
        None,
        lstm.OPTIMIZERS["sgd"],
        _hash_of_text,
    ),
}

#: measured on request only, and in no table
OTHERS = {
    "gpt-4-ranks": replace(WORKLOADS["gpt"], about="the same on 4 ranks", ranks=4),
    "gpt-72-sequences": replace(
        WORKLOADS["gpt"],
        about="the same of 72 sequences a rank, as many as its gradient noise scale",
        batch=partial(_words, sequences=72),
    ),
    "gpt-72-sequences-4-ranks": replace(
        WORKLOADS["gpt"],
        about="the same of 72 sequences a rank on 4 ranks",
        batch=partial(_words, sequences=72),
        ranks=4,
    ),
    "gpt-256": replace(
        WORKLOADS["gpt"],
        about="the same of width 256, 3.7M parameters",
        build=partial(_gpt, width=256),
    ),
    "gpt-lion": replace(
        WORKLOADS["gpt"],
        about="the same, Lion lr .0003 to 0, clipping 1",
        kind="lion",
        training=lstm.Training(partial(optim.Lion, lr=3e-4, betas=(0.9, 0.99)), 1.0),
    ),
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    OTHERS["gpt-muon"] = replace(
        WORKLOADS["gpt"],
        about="the same of matrices only, Muon lr .002 to 0, clipping 1",
        kind="muon",
        build=_gpt_of_matrices,
        training=lstm.Training(partial(optim.Muon, lr=2e-3, adjust_lr_fn="match_rms_adamw"), 1.0),
    )
ALL = WORKLOADS | OTHERS
