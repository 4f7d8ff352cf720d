"""A rank's own file beside a framework's checkpoint, which holds rank 0's state only."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compll.files import replacing
from hipress.api import load_state_dict, state_dict
from hipress.errors import HipressError, StateError
from hipress.session import session_of

log = logging.getLogger("hipress")
RESUMES = "training resumes"


def file_of(folder: object, checkpoint: str = "") -> Path:
    """The file of this rank in a folder, which may hold those of several checkpoints."""
    parts = "hipress", checkpoint, f"{dist.get_rank()}.pt"
    return Path(str(folder)) / "-".join(filter(None, parts))


def save(ddp: DistributedDataParallel, file: Path) -> None:
    """Write this rank's state. A process that is killed meanwhile, or has no room, leaves the file
    as it was. Raises HipressError for what the disk refuses."""
    state = state_dict(ddp)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as written:
            torch.save(state, written)
    except OSError as error:
        raise HipressError(
            f"rank {dist.get_rank()}: the state was not written to {file} ({error.strerror}): an "
            "earlier file stays as it was"
        ) from error


def resume(ddp: DistributedDataParallel, file: Path | None) -> None:
    """Load this rank's state, if training resumes; None: it begins. Every rank must call this.
    Raises ConfigMismatch if some ranks resume and others begin, and the errors of `load`."""
    if file is None:
        session_of(ddp).coordinator.require_equal({RESUMES: False})
    else:
        load(ddp, file)


def load(ddp: DistributedDataParallel, file: Path) -> None:
    """Load this rank's state. If a rank has no file, all ranks go on without residuals, and warn.

    Raises StateError for a file that cannot be read, and the errors of hipress.load_state_dict.
    """
    coordinator = session_of(ddp).coordinator
    with coordinator.failures_told():
        state = _read(file) if file.exists() else None
    have = coordinator.require_equal({RESUMES: True}, state is not None)
    if state is not None and all(have):
        load_state_dict(ddp, state)
        return
    lacking = [str(r) for r, has in zip(coordinator.ranks, have, strict=True) if not has]
    log.warning(
        "hipress: rank %s lacks its file of the checkpoint in %s: residuals start at zero on all "
        "ranks", ", ".join(lacking), file.parent,
    )  # fmt: skip


def name_training(ddp: DistributedDataParallel) -> str:
    """A name for files of this training, new and the same on all ranks, which must all call it."""
    return str(session_of(ddp).coordinator.require_equal({}, secrets.token_hex(4))[0])


def _read(file: Path) -> Any:
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:  # torch and pickle raise many
        raise StateError(
            f"rank {dist.get_rank()}: {file} cannot be read ({error}): remove it, and training "
            "goes on without residuals"
        ) from error
