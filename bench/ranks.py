"""A module of bench that runs on emulated hosts, and whose rank 0 reports results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from bench import commands
from bench.netns import Network, NetworkError, environment
from hipress.tools.run.ending import orderly_end
from hipress.tools.run.figures import versions_here

_MARK = b"measured "  # others print, too


def run(main: Callable[..., None], rank: Callable[..., None]) -> None:
    """Run a module's `main`, or its `rank` in a process that `run_module` started."""
    if "RANK" in os.environ:
        typer.run(rank)
    else:
        with orderly_end("bench"):
            typer.run(main)


def run_module(network: Network, module: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Start `python -m module arguments` on every host, and yield rank 0's results as they come.

    Raises NetworkError if a rank fails. All processes have ended when this has.
    """
    program = [sys.executable, "-m", module, *arguments]
    outputs = [subprocess.PIPE, *[subprocess.DEVNULL] * (network.hosts - 1)]
    children = [
        network.start(rank, program, env=environment(network, rank), stdout=output)
        for rank, output in enumerate(outputs)
    ]
    try:
        assert children[0].stdout is not None
        for line in children[0].stdout:
            if line.startswith(_MARK):
                yield json.loads(line.removeprefix(_MARK))
        if any(child.wait() for child in children):
            raise NetworkError(f"a rank of {module} failed, see above")
    finally:
        for child in children:
            child.kill()
            child.wait()
        if children[0].stdout is not None:
            children[0].stdout.close()


def tell(**data: Any) -> None:
    """Run on all ranks; rank 0 prints its result to the process that started it."""
    print(_MARK.decode() + json.dumps(data), flush=True)


def record(output: Path, module: str, title: str, text: str, **data: Any) -> None:
    """Write data as JSON and the text as Markdown into an existing folder, in files named after the
    module, and print the text."""
    command, date = commands.command_line(module), commands.now()
    about = {"command": command, "date": date, "versions": versions_here()}
    file = output / module.rpartition(".")[2]
    file.with_suffix(".json").write_text(json.dumps(about | data) + "\n")
    file.with_suffix(".md").write_text(f"# {title}\n\n`{command}`, {date}\n\n{text}\n")
    print(text)
