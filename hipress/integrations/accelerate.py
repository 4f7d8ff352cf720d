"""A hook for Accelerate's Accelerator."""

from __future__ import annotations

from typing import Any

from hipress import registry
from hipress.integrations import files
from hipress.integrations.prepared import ddp_to_attach
from hipress.session import Session
from hipress.ways.wrap import attach as attach_

__all__ = ["attach"]

ADVICE = (
    "call attach after accelerator.prepare, with the model that it returned. For a model of FSDP2 "
    "call hipress.shard(model) instead"
)


def attach(
    accelerator: Any, model: Any, *args: Any, resume: str | None = None, **options: Any
) -> None:
    """`hipress.attach` to a model that `prepare` returned; `accelerator.save_state` then saves
    residuals, too. Arguments as for `hipress.attach`, such as `optimizer`. With one process it does
    nothing.

    resume: the folder from which `accelerator.load_state` has loaded, before this call; all ranks
    resume, or none. Raises ConfigError for a model that is not prepared, or not for DDP; the errors
    of `hipress.attach` and of `hipress.load_state_dict`.
    """
    ddp = ddp_to_attach(model, ADVICE)
    if ddp is None:
        return
    attach_(ddp, *args, **options)
    files.resume(ddp, None if resume is None else files.file_of(resume))

    def save(models: object, weights: object, folder: str) -> None:
        if registry.get(ddp, Session) is not None:  # it is not detached
            files.save(ddp, files.file_of(folder))

    accelerator.register_save_state_pre_hook(save)
