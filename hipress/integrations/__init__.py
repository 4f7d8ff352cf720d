"""Callbacks that attach hipress within other frameworks, and save what it keeps.

::

    lightning.Trainer(callbacks=[hipress.integrations.lightning.HiPress("int4_group")])
    trainer.add_callback(hipress.integrations.transformers.HiPress(trainer, "int4_group"))
    hipress.integrations.accelerate.attach(accelerator, model, "int4_group", optimizer=optimizer)
    hipress.integrations.write(writer, model, step)  # of TensorBoard, or a run of W&B

With one process there is no DistributedDataParallel, and they do nothing. Import the module of your
framework; none is imported here.
"""

from __future__ import annotations

from typing import Any

from hipress.api import report

__all__ = ["scalars", "write"]


def scalars(model: Any) -> dict[str, float]:
    """Means of a step so far, by name: bytes that this rank sends, their share of DDP's (of FSDP2's
    for `hipress.shard`), and milliseconds that encode, decode and the wait after the backward pass
    take; {} before a step. Of a process group `hipress`, bytes of a backward pass. Of an Outer,
    bytes of a round, the share of the time in training, and numbers of sites and rounds."""
    figures: dict[str, float] = report(model).scalars()
    return figures


def write(writer: Any, model: Any, step: int) -> None:
    """Write `scalars`: to TensorBoard (an object with `add_scalar(name, value, step)`), or to W&B
    or Lightning (one with `log(values, step=)` or `log_metrics(values, step=)`)."""
    values = scalars(model)
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    elif values:
        (writer.log_metrics if hasattr(writer, "log_metrics") else writer.log)(values, step=step)
