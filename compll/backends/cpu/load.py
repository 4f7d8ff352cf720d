"""From the text of kernels to functions: compiled by numba once, then loaded from the cache."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import platform
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any

import numpy as np

from compll.backends.cpu import native as cpu_native
from compll.backends.cpu.declare import Declared, by_numba, declared
from compll.backends.cpu.native import Stored
from compll.backends.cpu.parallel_compile import begun, result, shares
from compll.runtime.cache import alone, folder, spare, usual, write

log = logging.getLogger("compll")


@cache
def runtime_version() -> str:
    """What a cached kernel depends on besides its own text."""
    here = Path(__file__).parent
    own = (
        "bitstreams called codes compress_store declare elementary gaps halves memory "
        "native nontemporal_stores object ops runtime tables trits"
    )
    others = ("elementary", "matrices", "numbers", "quantiles")
    files = (
        *(here / f"{name}.py" for name in own.split()),
        *(here.parents[1] / "numerics" / f"{name}.py" for name in others),
    )
    sources = b"".join(file.read_bytes() for file in files)
    parts = (numba_version(), np.__version__, platform.python_version())
    return " ".join((*parts, hashlib.sha256(sources).hexdigest()))


def numba_version() -> str:
    """Numba's, read from its file: importing it takes longer than a whole warm start."""
    with suppress(OSError, ValueError):
        spec = importlib.util.find_spec("numba")
        if spec and spec.origin:
            return (Path(spec.origin).parent / "_version.py").read_text()
    import numba

    return str(numba.__version__)


def load(name: str, text: str) -> Any:
    """The kernels that a generated text declares, as attributes."""
    path = place(name, text)
    return either(path, cache(partial(saved, path, text)), cache(partial(imported, path, text)))


def place(name: str, text: str) -> Path:
    """Where the text of kernels, or what they compile to, is cached."""
    digest = hashlib.sha256(f"{text}{runtime_version()}".encode()).hexdigest()[:16]
    return folder("cpu") / f"{name}_{digest}.py"


def either(path: Path, source: Callable[[], Path] | None, module: Callable[[], Any]) -> Any:
    """The kernels of a module from its object file, made if need be, or by numba.

    source: what another process compiles half of; None where that would not pay.
    """
    compiled = by_numba(module)
    if cpu_native.possible():
        file = path.with_suffix(f".{cpu_native.tag()}.native")
        # others may have filled a folder that this process cannot write to
        stored = cpu_native.read(usual("cpu") / file.name) or kept(file, source, module)
        with suppress(RuntimeError):
            return cpu_native.link(stored, compiled)
    return SimpleNamespace(**{name: compiled(name) for name in declared(module())})


def saved(path: Path, text: str) -> Path:
    """The file of a text, written if need be: elsewhere, where another user's lies in its place, or
    the disk has become full."""
    if not holds(path, text):
        try:
            write(path, text)
        except OSError:
            path = spare("cpu") / path.name
            write(path, text)
            importlib.import_module("compll._kernels").__path__[:0] = [str(path.parent)]
        importlib.invalidate_caches()
    return path


def holds(path: Path, text: str) -> bool:
    """Whether a file holds this text; it does not where a machine stopped while it was written."""
    try:
        return path.read_text("utf-8") == text
    except (OSError, ValueError):
        return False


def imported(path: Path, text: str) -> Any:
    """The module of a text."""
    return importlib.import_module(f"compll._kernels.{saved(path, text).stem}")


def kept(path: Path, source: Callable[[], Path] | None, module: Callable[[], Any]) -> Stored:
    """What another process has just compiled, or what this one compiles."""
    log.info("compiling kernels of %s, which are then cached", path.stem.rpartition("_")[0])
    with alone(path):
        return cpu_native.read(path) or keep(path, source, module)


def keep(path: Path, source: Callable[[], Path] | None, module: Callable[[], Any]) -> Stored:
    """Compile a module for this process and later ones; an empty object where that cannot be.

    Numba's insides may be other than known, in any way; it then goes on to serve by itself.
    """
    with begun(source()) if source else nullcontext() as other:
        kernels = declared(module())
        try:
            found = compiled_with(other, kernels)
        except Exception:
            found = Stored({}, ())
    with suppress(OSError):
        write(path, cpu_native.packed(found))
    return found


def compiled_with(other: Popen[bytes] | None, kernels: dict[str, Declared]) -> Stored:
    """The kernels, compiled here or there."""
    from compll.backends.cpu.object import stored

    own, others = shares(kernels) if other else (kernels, {})
    here: Stored = stored(own)
    if other is None:
        return here
    there: Stored = result(other) or stored(others)
    return Stored(here.kernels | there.kernels, here.images + there.images)
