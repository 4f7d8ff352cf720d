"""Reports when everything that casync and hipress run as the interpreter ends has run.

Exit handlers run in reverse order, and this module is imported before theirs, and after torch.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

LAST: list[Callable[[], None]] = []


@atexit.register
def _tell() -> None:
    for each in LAST:
        each()
