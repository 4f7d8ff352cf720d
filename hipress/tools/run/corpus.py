"""A text that every machine has: the source of Python's standard library, as word numbers.

The same interpreter gives the same numbers: files are read in sorted order, and words of equal
frequency are ranked alphabetically.
"""

import os
import re
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compll.files import replacing

VOCABULARY = 10_000
MAX_CHARACTERS = 8_000_000
_FORMAT = 1  # increment if the tokenizer changes: cached numbers of other formats are ignored

# Identifiers, numbers, line ends and single punctuation marks; blanks only separate.
_TOKEN = re.compile(r"[^\W\d]\w*|\d+|\n|[^\w\s]")
# Absent from some distributions, or not part of the library.
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "__pycache__",
}


def tokenize(text: str) -> list[str]:
    """Identifiers, numbers, punctuation marks and line ends, in order."""
    return _TOKEN.findall(text)


def number(tokens: Iterable[str], vocabulary: int) -> NDArray[np.int64]:
    """Rank of each token by frequency, from 1; 0 for all beyond the first `vocabulary` - 1."""
    tokens = list(tokens)
    ranked = sorted(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))
    numbers = {token: rank for rank, (token, _) in enumerate(ranked[: vocabulary - 1], start=1)}
    return np.fromiter((numbers.get(token, 0) for token in tokens), np.int64, len(tokens))


def standard_library() -> Path:
    """The folder of the running Python's own source."""
    return Path(sysconfig.get_paths()["stdlib"])


def load(folder: Path | None = None, *, characters: int = MAX_CHARACTERS) -> NDArray[np.int64]:
    """The numbers of the first `characters` of source below `folder`. Raises ValueError if there
    are too few words to train on."""
    tokens = tokenize("\n".join(_texts(folder or standard_library(), characters)))
    if len(tokens) < 10_000:
        raise ValueError(
            f"only {len(tokens)} words of Python source below {folder or standard_library()}"
        )
    return number(tokens, VOCABULARY)


def prepare() -> Path:
    """The path of the numbers as an .npy file; made on the first call, kept between runs."""
    version = f"{sys.implementation.cache_tag}-{sys.version_info.micro}"
    path = _cache() / f"corpus-{version}-{MAX_CHARACTERS}-{VOCABULARY}-{_FORMAT}.npy"
    if not path.exists():
        part = path.with_name(f"{os.urandom(8).hex()}.tmp")  # other processes may write it, too
        with replacing(path, part) as file:
            np.save(file, load())
    return path


def _texts(folder: Path, characters: int) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        if characters <= 0:
            return
        if _SKIPPED.isdisjoint(path.relative_to(folder).parts):
            text = path.read_text(encoding="utf-8", errors="replace")[:characters]
            characters -= len(text)
            yield text


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "hipress"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hipress-"))
    return path
