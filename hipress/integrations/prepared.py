"""The model that a framework has prepared for training."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hipress import compat
from hipress.errors import ConfigError

__all__ = ["ddp_in", "ddp_to_attach"]


def ddp_in(model: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel, maybe compiled, that `model` is; None for another model."""
    inner = compat.uncompiled(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def ddp_to_attach(model: Any, advice: str) -> DistributedDataParallel | None:
    """Like `ddp_in`; None with one process, in which nothing travels. With several raises
    ConfigError for another model, whose gradients would travel uncompressed."""
    ddp = ddp_in(model)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if ddp is None and not alone:
        raise ConfigError(
            f"expected a DistributedDataParallel, got a {type(model).__name__}: {advice}"
        )
    return ddp
