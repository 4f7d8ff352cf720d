"""Where compiled kernels are kept between processes: $COMPLL_CACHE, or the user's cache."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import platformdirs


@cache
def folder(kind: str) -> Path:
    """A writable folder for one backend's files; a temporary one where the usual one is not."""
    root = Path(os.environ.get("COMPLL_CACHE") or platformdirs.user_cache_dir("compll"))
    try:
        path = root / kind
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"compll-{kind}-"))


def write(path: Path, text: str | bytes) -> None:
    """Write a file so that another process sees all of it or none."""
    data = text.encode() if isinstance(text, str) else text
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(path)
