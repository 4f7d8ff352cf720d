"""Shared by the commands of bench: the folder of results, refusals, the command in a result."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hipress.tools import refusals
from hipress.tools.run import methods

RESULTS = Path(__file__).parent / "results"
refusing = partial(refusals.refusing, "bench")


def check_codecs(names: Iterable[str]) -> None:
    """Raise ValueError for an unknown compressor; names may have parameters: dgc:ratio=0.01."""
    methods.check([methods.parse(f"hipress:{name}") for name in names])


def other_rows(
    path: Path, about: dict[str, Any], names: Collection[str], key: str
) -> list[dict[str, Any]]:
    """The rows of a file whose key is not among these names.

    Raises ValueError if they are of another machine, version or option, since a file has only one.
    """
    if not path.is_file():
        return []
    data = json.loads(path.read_text())
    rows = [row for row in data["rows"] if row[key] not in names]
    differ = [
        f"{what} {data['about'].get(what)}, not {value}"
        for what, value in about.items()
        if what not in ("date", "command") and data["about"].get(what) != value
    ]
    if rows and differ:
        raise ValueError(
            f"{path} holds other rows that were measured with {'; '.join(differ)}: name no codec, "
            "to measure all anew, or give another --output"
        )
    return rows


def command_line(module: str) -> str:
    """The command line that started `python -m module`."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
