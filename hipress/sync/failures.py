"""What a module's failures are called, and the one after which no step may follow."""

from __future__ import annotations

import time

import torch

from casync.errors import CasyncError, TransportError, copy_to_raise
from casync.runtime.watch import LOOK, REDUCE_LOOKS
from casync.transports.distributed import transport_error
from hipress.errors import HipressError, SyncError
from hipress.ranks.meeting import Meeting


class Failures:
    """Of one engine."""

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        """timeout: seconds that a native all-reduce may take."""
        self._meeting, self._timeout = meeting, timeout
        self._name = meeting.ranks[meeting.rank]
        self._first: BaseException | None = None
        self._by = ""  # what broke
        self._gone_since: float | None = None

    @property
    def first(self) -> str | None:
        """What failed first, and how; None if nothing did."""
        return None if self._first is None else f"{self._by} failed: {self._first}"

    def refuse(self) -> None:
        """Raise SyncError after a failure: no step may follow."""
        if self._first is not None:
            raise SyncError(self.first) from self._first

    def keep(self, error: BaseException, what: str) -> Exception:
        """Keep what failed first, and tell other ranks of it; returns it as an error of ours."""
        self._meeting.fail(error)  # others see a broken connection only
        if not isinstance(error, CasyncError | HipressError):
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                text = f"interrupted by a {type(error).__name__}"
            error = SyncError(f"rank {self._name}: {text}")
        self._first, self._by = copy_to_raise(error), what
        return error

    def not_begun(self, error: Exception, step: int) -> Exception:
        """Of a bucket that could not be handed over."""
        if isinstance(error, CasyncError | HipressError):
            return error
        what = f"the bucket could not be handed over: {type(error).__name__}: {error}"
        named = SyncError(f"{self._where(step)}: {what}")
        named.__cause__ = error
        return named

    def not_averaged(self, error: Exception, step: int) -> Exception:
        """Errors of ours as they are; torch's, of a native all-reduce, with where."""
        if isinstance(error, CasyncError | HipressError):
            return error
        what = f"{self._where(step)}: the all-reduce of uncompressed gradients"
        return transport_error(error, what, self._timeout)

    def explained(self, error: Exception, step: int) -> Exception:
        """Of what other ranks are to blame for, with what is known of them."""
        return self._meeting.named(error, f"step {step}")

    def look(self) -> None:
        """Raise TransportError where a rank ended so long ago that what others wait for does not
        come: see [Note: a peer that is gone] in casync/runtime/watch.py."""
        gone, now = self._meeting.gone(), time.monotonic()
        self._gone_since = None if gone is None else (self._gone_since or now)
        if gone is not None and now - (self._gone_since or now) > LOOK * REDUCE_LOOKS:
            raise TransportError(f"rank {self._name}: {gone.told()}, and owes what is waited for")

    def refuse_parted(self, failed: torch.optim.Optimizer, step: int) -> None:
        """Raise SyncError where this optimizer failed, which it did not on all ranks."""
        what = f"the step of {type(failed).__name__} before step {step}"
        others = self._meeting.silent(what)  # of those that say the same
        if others:
            names = ", ".join(map(str, others))
            raise SyncError(
                f"{what} raised an error, or was interrupted, on rank {self._name} and not on "
                f"rank {names}: their parameters differ"
            )

    def _where(self, step: int) -> str:
        return f"rank {self._name}, step {step}"
