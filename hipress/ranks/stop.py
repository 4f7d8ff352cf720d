"""The reason why a rank cannot go on: see [Note: stopping] in coordinator.py."""

from __future__ import annotations

from dataclasses import dataclass

from casync.errors import TransportError
from hipress.errors import AgreementTimeout, ConfigMismatch, HipressError, RankLost

_KINDS = {kind.__name__: kind for kind in (AgreementTimeout, ConfigMismatch, RankLost)}


@dataclass(frozen=True)
class Stop:
    """The reason why a rank cannot go on, as told to the others."""

    kind: str  # class name of the error that the others raise
    who: str  # such as "rank 1 failed"
    what: str = ""
    ended: bool = False  # True if processes ended; that is so for the whole epoch

    def error(self, rank: int) -> HipressError:
        """The error that another rank, with global number `rank`, raises."""
        return _KINDS[self.kind](f"rank {rank} stops, because {self.told()}")

    def told(self, when: str = "") -> str:
        """Text such as "rank 1 failed during step 2: ValueError: no such word"."""
        return f"{self.who}{when}: {self.what}" if self.what else f"{self.who}{when}"

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Stop:
        """The stop of this rank, by its own error, and by the notes on it, which may name another
        rank for which it waited in vain."""
        if isinstance(error, TransportError) or isinstance(error.__cause__, TransportError):
            return cls("RankLost", f"rank {rank} failed", str(error))  # in a step
        if isinstance(error, AgreementTimeout | RankLost):
            return cls(type(error).__name__, str(error))
        if isinstance(error, Exception):
            notes = getattr(error, "__notes__", ())
            text = "\n".join([f"{type(error).__name__}: {error}", *notes])
            return cls("ConfigMismatch", f"rank {rank} failed", text)
        return cls("RankLost", f"rank {rank} was interrupted by a {type(error).__name__}")
