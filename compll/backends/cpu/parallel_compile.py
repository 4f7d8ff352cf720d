"""Half of a module's kernels compiled by another process, while this one compiles the rest.

Numba compiles on one core, and who compiles has nothing else to do. So a fresh Python, which knows
of this process only the kernels' source, compiles its share of them and writes that to its standard
output. Whatever becomes of it, this process can do without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from compll.backends.cpu.declare import Declared, declared
from compll.backends.cpu.native import Stored, packed, unpacked

#: characters of source below which Python's start takes as long as what it spares
LEAST = 5000
#: seconds for which the other process is waited for, once this one is done
PATIENCE = 60.0
PROGRAM = "import sys; from compll.backends.cpu.parallel_compile import main; main(*sys.argv[1:])"


def shares(kernels: dict[str, Declared]) -> tuple[dict[str, Declared], dict[str, Declared]]:
    """This process's kernels, among them the longest, and the other's: about as much code."""
    found: tuple[dict[str, Declared], dict[str, Declared]] = ({}, {})
    lengths = [0, 0]
    for name in sorted(kernels, key=lambda name: -length(kernels[name])):
        less = lengths.index(min(lengths))
        lengths[less] += length(kernels[name])
        found[less][name] = kernels[name]
    return found


def length(kernel: Declared) -> int:
    """A kernel's bytes of bytecode, by which its compilation's time goes."""
    return len(kernel.function.__code__.co_code) * len(kernel.signatures)


def allowed() -> bool:
    """Whether there is a second core, and Python can be started; COMPLL_JOBS=1 forbids it."""
    if os.environ.get("COMPLL_JOBS") == "1" or getattr(sys, "frozen", False):
        return False
    return bool(sys.executable) and cores() > 1


def cores() -> int:
    """Cores that this process may use, or all where the system does not tell (macOS, Windows)."""
    known = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if known is None else len(known(0))


@contextmanager
def begun(source: Path) -> Iterator[subprocess.Popen[bytes] | None]:
    """The other process, at work on its share of a source's kernels; None where it would not pay.

    It ends with the context.
    """
    process = None
    with suppress(OSError):
        if allowed() and source.stat().st_size >= LEAST:
            process = start(source)
    if process is None:
        yield None
        return
    try:
        yield process
    finally:
        process.kill()
        with process:  # waits for its end
            pass


def start(source: Path) -> subprocess.Popen[bytes]:
    """A Python that finds what this one does, and nothing in the folder where it runs."""
    path = os.pathsep.join(each for each in sys.path if each)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(source)],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def result(process: subprocess.Popen[bytes]) -> Stored | None:
    """What the other process compiled; None if it failed or takes too long."""
    try:
        data, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    return unpacked(data) if process.returncode == 0 else None


def main(source: str) -> None:
    """The other process: compile its share of a source's kernels."""
    from compll.backends.cpu.object import stored

    _, mine = shares(declared(module(Path(source))))
    sys.stdout.buffer.write(packed(stored(mine)))


def module(source: Path) -> Any:
    """The module of a file, wherever that lies."""
    spec = spec_from_file_location(source.stem, source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is no module")
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
