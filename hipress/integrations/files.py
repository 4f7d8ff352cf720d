"""A rank's own file beside a framework's checkpoint, which holds rank 0's state only."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hipress.api import load_state_dict, state_dict

log = logging.getLogger("hipress")


def file_of(folder: object, step: int | str = "") -> Path:
    """The file of this rank in a checkpoint's folder."""
    parts = "hipress", str(step), f"{dist.get_rank()}.pt"
    return Path(str(folder)) / "-".join(filter(None, parts))


def save(ddp: DistributedDataParallel, file: Path) -> None:
    """Write this rank's state. A process that is killed meanwhile leaves the file as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    begun = file.with_suffix(".begun")
    torch.save(state_dict(ddp), begun)
    begun.replace(file)


def load(ddp: DistributedDataParallel, file: Path) -> None:
    """Load this rank's state; without the file, go on without residuals, and warn."""
    if file.exists():
        load_state_dict(ddp, torch.load(file, weights_only=True))
    else:
        log.warning("hipress: %s is missing: residuals start at zero", file)
