"""What the commands of bench share: where results go, how one is refused, what a result names."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import typer

from hipress.demo import methods

RESULTS = Path(__file__).parent / "results"


@contextmanager
def refusing() -> Iterator[None]:
    """A ValueError or an OSError ends the program with its message and status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None


def check_codecs(names: Iterable[str]) -> None:
    """ValueError for what no compressor is called, also with parameters, as in dgc:ratio=0.01."""
    methods.check([methods.parse(f"hipress:{name}") for name in names])


def given(module: str) -> str:
    """The command line that started `python -m module`."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
