"""Inference servers that follow a trainer: a backend of vLLM, and a loader of SGLang."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch

from hipress.weights.receiver import Receiver


class Model(Protocol):
    """A model of a server."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], /) -> Any:
        """Take tensors by the names of a checkpoint."""


@functools.cache  # plugins may be loaded more than once
def register_vllm() -> None:
    """Make the weight-transfer backend "hipress" known to vLLM, which calls this in each process
    by the entry point `vllm.general_plugins`."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    Factory.register_engine("hipress", "hipress.weights.vllm_engine", "HipressEngine")


def sglang_request(checkpoint: str, source: str, version: int) -> list[tuple[str, torch.Tensor]]:
    """Named tensors for SGLang's `update_weights_from_tensor`, by which `load_in_sglang` brings the
    server's checkpoint to a version of a folder, and loads it."""
    texts = {"checkpoint": checkpoint, "source": source, "version": str(version)}
    return [
        (n, torch.frombuffer(bytearray(t.encode()), dtype=torch.uint8)) for n, t in texts.items()
    ]


def load_in_sglang(model: Model, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's loader for the tensors of `sglang_request`: start the server with
    `--custom-weight-loader hipress.weights.servers.load_in_sglang`, and name it as `load_format`.

    Raises the errors of Receiver.apply, before any change of the model.
    """
    texts = {n: np.asarray(t.cpu()).tobytes().decode() for n, t in named_tensors}
    receiver = Receiver(texts["checkpoint"], texts["source"])
    receiver.apply(int(texts["version"]))
    model.load_weights(receiver.tensors())
