"""A hook for Accelerate's Accelerator."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hipress.frontends.wrapping import attach as attach_
from hipress.integrations import files

__all__ = ["attach"]


def attach(
    accelerator: Any, model: Any, *args: Any, resume: str | None = None, **options: Any
) -> None:
    """`hipress.attach` to a model that `prepare` returned; `accelerator.save_state` then saves
    residuals, too. Arguments as for `hipress.attach`, such as `optimizer`.

    resume: the folder from which `accelerator.load_state` has loaded, before this call.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    attach_(model, *args, **options)
    if resume is not None:
        files.load(model, files.file_of(resume))

    def save(models: object, weights: object, folder: str) -> None:
        files.save(model, files.file_of(folder))

    accelerator.register_save_state_pre_hook(save)
