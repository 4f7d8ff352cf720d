"""A callback for Trainer of Transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from hipress.integrations import files, scalars
from hipress.integrations.prepared import ddp_in, ddp_to_attach
from hipress.ways.wrap import attach

__all__ = ["HiPress"]

ADVICE = (
    "this callback needs a Trainer that trains by DDP, as torchrun starts it without fsdp or "
    "deepspeed in TrainingArguments"
)
KEY = "hipress"  # in the trainer's state, with the name of the training
log = logging.getLogger("hipress")


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
        return ddp_in(self._trainer.model_wrapped)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach, and load the state of the checkpoint from which training goes on. Raises
        ConfigError for several processes without DDP."""
        ddp = ddp_to_attach(self._trainer.model_wrapped, ADVICE)
        if ddp is None:
            return
        attach(ddp, *self._args, **{"optimizer": self._trainer.optimizer} | self._options)
        file = None
        if state.global_step and KEY in state.stateful_callbacks:
            file = _file(args, state)
        elif state.global_step:
            log.warning("hipress: the checkpoint has no residuals: they start at zero")
        files.resume(ddp, file)
        if file is None:  # a new training: its files are no other one's
            state.stateful_callbacks[KEY] = {"training": files.name_training(ddp)}

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save this rank's state; called on every rank."""
        if self._ddp is not None:
            files.save(self._ddp, _file(args, state))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Add means of a step to the logs."""
        if self._ddp is not None and logs is not None:
            logs.update(scalars(self._ddp))


def _file(args: Any, state: Any) -> Path:
    folder = f"{args.output_dir}/checkpoint-{state.global_step}"
    return files.file_of(folder, state.stateful_callbacks[KEY]["training"])
