"""A callback for Trainer of Transformers."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from hipress.frontends.wrapping import attach
from hipress.integrations import files, scalars

__all__ = ["HiPress"]


class HiPress(TrainerCallback):
    """`hipress.attach` with these arguments as training begins; residuals are saved in the
    trainer's checkpoints, and its logs get `hipress.integrations.scalars`.

    The trainer's optimizer is passed as `optimizer`.
    """

    def __init__(self, trainer: Any, *args: Any, **options: Any) -> None:
        """The trainer, which then gets this by `add_callback`, and arguments of `hipress.attach`
        without the module."""
        self._trainer, self._args, self._options = trainer, args, options

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        model = self._trainer.model_wrapped
        return model if isinstance(model, DistributedDataParallel) else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach, and load the state of the checkpoint from which training goes on."""
        ddp = self._ddp
        if ddp is None:
            return
        attach(ddp, *self._args, **{"optimizer": self._trainer.optimizer} | self._options)
        if state.global_step:
            files.load(ddp, files.file_of(_folder(args, state)))

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save this rank's state; called on every rank."""
        if self._ddp is not None:
            files.save(self._ddp, files.file_of(_folder(args, state)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Add means of a step to the logs."""
        if self._ddp is not None and logs is not None:
            logs.update(scalars(self._ddp))


def _folder(args: Any, state: Any) -> str:
    return f"{args.output_dir}/checkpoint-{state.global_step}"
