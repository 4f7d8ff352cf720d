"""A module of bench on emulated hosts, where rank 0 tells what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.netns import Network, NetworkError, environment

_MARK = b"measured "  # others print, too


def told(network: Network, module: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Starts `python -m module arguments` on every host, and gives what rank 0 tells, as it does.
    NetworkError where a rank fails; all have ended when this has."""
    program = [sys.executable, "-m", module, *arguments]
    outputs = [subprocess.PIPE, *[subprocess.DEVNULL] * (network.hosts - 1)]
    children = [
        network.start(rank, program, environment=environment(network, rank), stdout=output)
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


def tell(**data: Any) -> None:
    """What all ranks call, and who started them hears of rank 0."""
    print(_MARK.decode() + json.dumps(data), flush=True)
