"""Codecs that are compiled while something else happens: training need not wait for a compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from casync.codec import Codec


class Compiling:
    """Compiles in a thread of its own, from now on."""

    def __init__(self, compile_all: Callable[[], Mapping[str, Codec]]) -> None:
        """`compile_all`: gives the codecs, by key."""
        self._compile_all = compile_all
        self._codecs: Mapping[str, Codec] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hipress-compile", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether all are, or one could not be."""
        return not self._thread.is_alive()

    def codecs(self) -> Mapping[str, Codec]:
        """Waits for all; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._codecs

    def _run(self) -> None:
        try:
            self._codecs = self._compile_all()
        except BaseException as error:
            self._error = error
