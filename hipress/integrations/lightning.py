"""A callback for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel

from hipress.frontends.wrapping import attach
from hipress.integrations import files, write

__all__ = ["HiPress"]


class HiPress(Callback):
    """`hipress.attach` with these arguments as training begins; residuals are saved beside
    Lightning's checkpoints, and the trainer's logger gets `hipress.integrations.scalars`.

    The module's optimizer, if it has one, is passed as `optimizer`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments of `hipress.attach`, without the module."""
        self._args, self._options = args, options
        self._loaded: int | None = None  # the step of a loaded checkpoint

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Attach, and load the state of the checkpoint from which training goes on."""
        ddp = _ddp(trainer)
        if ddp is None:
            return
        own = {"optimizer": trainer.optimizers[0]} if len(trainer.optimizers) == 1 else {}
        attach(ddp, *self._args, **own | self._options)
        if self._loaded is not None:
            files.load(ddp, files.file_of(trainer.default_root_dir, self._loaded))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write to the logger as often as Lightning does."""
        ddp, step = _ddp(trainer), trainer.global_step
        if ddp is not None and trainer.logger and step % trainer.log_every_n_steps == 0:
            write(trainer.logger, ddp, step)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Save this rank's state; called on every rank."""
        ddp = _ddp(trainer)
        if ddp is not None:
            files.save(ddp, files.file_of(trainer.default_root_dir, checkpoint["global_step"]))

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Remember the step; the DDP module does not exist yet."""
        self._loaded = checkpoint["global_step"]


def _ddp(trainer: Any) -> DistributedDataParallel | None:
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None
