"""Refusals of bad input, before any work."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from casync.errors import TransportError
from hipress.errors import HipressError

__all__ = ["check_device", "check_output", "refusing"]


@contextmanager
def refusing(program: str = "hipress") -> Iterator[None]:
    """A context in which errors of input, files and hipress end the program by a message and
    status 2."""
    try:
        yield
    except (ValueError, OSError, HipressError, TransportError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def check_device(device: str) -> None:
    """Raise ValueError for an unknown device, or one that this machine lacks."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; choose from: cpu, cuda")
    if device == "cuda":
        import torch  # not above: it takes its time

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device here")


def check_output(folder: Path) -> None:
    """Raise OSError for a folder that cannot be written to, before any work."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
