"""Codecs that are compiled while training goes on."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING

from casync.shutdown import close_at_exit
from hipress.ranks.store import fulfil

if TYPE_CHECKING:
    from casync.codec import Codec
    from hipress.choose.places import Places

__all__ = ["Compilation"]

_PATIENCE = 5.0  # seconds that close() waits for the codec that is being compiled


class Compilation:
    """A thread that compiles the codecs of places."""

    def __init__(self, places: Places) -> None:
        self._stopped = threading.Event()
        self._codecs: Future[dict[str, Codec]] = Future()
        work = partial(fulfil, self._codecs, partial(places.compile, self._refuse_stopped))
        self._thread = threading.Thread(target=work, name="hipress-compile", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def done(self) -> bool:
        """True if `result` does not wait."""
        return self._codecs.done()

    def result(self) -> dict[str, Codec]:
        """The compiled codecs, by key. Raises the error that ended the compilation, CancelledError
        after `stop`."""
        return self._codecs.result()

    def stop(self) -> None:
        """Let the thread end before its next codec."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and wait for that: no compiler may run as the interpreter ends."""
        self.stop()
        self._thread.join(_PATIENCE)

    def _refuse_stopped(self) -> None:
        if self._stopped.is_set():
            raise CancelledError
