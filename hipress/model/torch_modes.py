"""A context outside of torch's inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """A context in which new tensors can be written to later, unlike those of inference mode."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        yield
