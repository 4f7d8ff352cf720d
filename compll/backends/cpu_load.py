"""From the text of kernels to functions: compiled by numba once, then loaded from the cache."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from compll.backends import cpu_native
from compll.backends.cpu_native import Stored
from compll.cache import folder, write

#: a function with a declared signature, which is what a module is loaded for
DECLARED = re.compile(r'^@njit\("[^\n]*\ndef (\w+)', re.MULTILINE)


@cache
def runtime_version() -> str:
    """What a cached kernel depends on besides its own text."""
    here = Path(__file__).parent
    own = "bitstreams elementary halves native object ops runtime tables trits"
    files = [*(f"cpu_{name}" for name in own.split()), "elementary", "../quantiles"]
    sources = b"".join((here / f"{name}.py").read_bytes() for name in files)
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
    """The functions that a text declares, as attributes; compiled once per cache folder."""
    digest = hashlib.sha256(f"{text}{runtime_version()}".encode()).hexdigest()[:16]
    path = folder("cpu") / f"{name}_{digest}.py"
    compiled = cache(partial(by_numba, path, text))
    if cpu_native.possible():
        file = path.with_suffix(f".{cpu_native.tag()}.native")
        stored = cpu_native.read(file) or keep(file, compiled, DECLARED.findall(text))
        with suppress(RuntimeError):
            return cpu_native.link(stored, compiled)
    return compiled()


def by_numba(path: Path, text: str) -> Any:
    """The imported module, compiled or from numba's own cache."""
    if not path.exists():
        write(path, text)
        importlib.invalidate_caches()
    return importlib.import_module(f"compll._kernels.{path.stem}")


def keep(path: Path, compiled: Callable[[], Any], names: list[str]) -> Stored:
    """Store compiled functions for this process and later ones; an empty object where they cannot.

    Numba's insides may be other than known, in any way; it then goes on to serve by itself.
    """
    kernels = compiled()
    try:
        from compll.backends.cpu_object import stored

        found: Stored = stored({name: getattr(kernels, name) for name in names})
    except Exception:
        found = Stored({}, b"")
    with suppress(OSError):
        write(path, cpu_native.packed(found))
    return found
