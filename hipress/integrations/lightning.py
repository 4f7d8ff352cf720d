"""A callback for Lightning's Trainer.

[Note: files of Lightning] A callback is told that a checkpoint is saved, but not to which path, nor
when Lightning removes it. So the methods of the strategy that do both, which every rank calls, also
write and remove this rank's file beside the checkpoint. Checkpoints of one folder and step share a
file. Its name is in the checkpoint, and no other training's.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel

from hipress.integrations import files, write
from hipress.integrations.prepared import ddp_in, ddp_to_attach
from hipress.ways.wrap import attach

__all__ = ["HiPress"]

ADVICE = (
    'this callback needs the Trainer\'s strategy "ddp" (DDPStrategy). For a model of FSDP2 call '
    "hipress.shard(model) in configure_model instead"
)
KEY = "hipress"  # in a checkpoint
log = logging.getLogger("hipress")


class HiPress(Callback):
    """`hipress.attach` with these arguments as training begins; residuals are saved beside
    Lightning's checkpoints, and the trainer's logger gets `hipress.integrations.scalars`.

    The module's optimizer, if it has one, is passed as `optimizer`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments of `hipress.attach`, without the module."""
        self._args, self._options = args, options
        self._training = ""  # its name in those of files
        self._loaded: dict[str, Any] | None = None  # what a checkpoint tells of its file
        self._saved: dict[str, str] = {}  # names of states by path of a checkpoint
        self._followed: Any = None  # the strategy that also saves states

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Attach, and load the state of the checkpoint from which training goes on. Raises
        ConfigError for several processes without DDP."""
        ddp = ddp_to_attach(trainer.strategy.model, ADVICE)
        loaded, self._loaded = self._loaded, None
        if ddp is None:
            return
        own = {"optimizer": trainer.optimizers[0]} if len(trainer.optimizers) == 1 else {}
        attach(ddp, *self._args, **own | self._options)
        file = None
        if trainer.ckpt_path is not None and loaded is not None:
            self._saved |= loaded["states"]
            file = files.file_of(_folder(trainer, trainer.ckpt_path), loaded["state"])
        elif trainer.ckpt_path is not None:
            log.warning("hipress: %s has no residuals: they start at zero", trainer.ckpt_path)
        files.resume(ddp, file)
        self._training = files.name_training(ddp)
        if self._followed is not trainer.strategy:
            self._follow(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write to the logger as often as Lightning does."""
        ddp, step = ddp_in(trainer.strategy.model), trainer.global_step
        if ddp is not None and trainer.logger and step % trainer.log_every_n_steps == 0:
            write(trainer.logger, ddp, step)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Put the name of the states' files into the checkpoint; called on every rank."""
        if ddp_in(trainer.strategy.model) is not None:
            state = f"{self._training}-{checkpoint['global_step']}"
            checkpoint[KEY] = {"state": state, "states": dict(self._saved)}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Remember the name; the DDP module does not exist yet."""
        self._loaded = checkpoint.get(KEY)

    def _follow(self, trainer: Any) -> None:
        """Save and remove this rank's files with checkpoints: see [Note: files of Lightning]."""
        self._followed = strategy = trainer.strategy
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        def save_checkpoint(checkpoint: Any, filepath: Any, *args: Any, **options: Any) -> None:
            ddp = ddp_in(strategy.model)
            if ddp is not None and KEY in checkpoint:
                self._save(ddp, trainer, filepath, checkpoint[KEY]["state"])
            save(checkpoint, filepath, *args, **options)

        def remove_checkpoint(filepath: Any) -> None:
            remove(filepath)
            self._forget(trainer, filepath)

        strategy.save_checkpoint, strategy.remove_checkpoint = save_checkpoint, remove_checkpoint

    def _save(self, ddp: DistributedDataParallel, trainer: Any, path: Any, state: str) -> None:
        file = files.file_of(_folder(trainer, path), state)
        if not file.exists():  # beside another checkpoint of this step
            files.save(ddp, file)
        if self._saved.get(str(path)) != state:
            self._forget(trainer, path)
        self._saved[str(path)] = state

    def _forget(self, trainer: Any, path: Any) -> None:
        """Remove the file of a checkpoint that is gone, if no other one shares it."""
        state = self._saved.pop(str(path), None)
        folder = _folder(trainer, path)
        shared = (_folder(trainer, each) for each, name in self._saved.items() if name == state)
        if state is not None and folder not in shared:
            files.file_of(folder, state).unlink(missing_ok=True)


def _folder(trainer: Any, path: Any) -> Path:
    """The folder of a checkpoint's files: its own, or Lightning's default for a remote one."""
    if "://" in str(path):
        return Path(str(trainer.default_root_dir))
    return Path(os.path.realpath(path)).parent
