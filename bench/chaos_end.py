"""Tells when all has run that casync and hipress have run as the interpreter ends: handlers run in
reverse order, and this module is imported before them, and after torch."""

from __future__ import annotations

import atexit
from collections.abc import Callable

LAST: list[Callable[[], None]] = []


@atexit.register
def _tell() -> None:
    for each in LAST:
        each()
