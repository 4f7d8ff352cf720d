"""Failures of a module: their errors, and the first one, after which no step may follow."""

from __future__ import annotations

import time

import torch

from casync.errors import CasyncError, TransportError, copy_to_raise
from casync.runtime.threads import LOOK, REDUCE_LOOKS
from casync.transports.distributed import transport_error
from hipress.errors import HipressError, RankLost, SyncError
from hipress.ranks.coordinator import Coordinator

#: a note on the error of ranks that go on after another one has ended
UNEVEN = (
    "If it had come to the end of its data before this rank: train within DDP's "
    "`with model.join():`, or take the same number of steps on every rank"
)


class Failures:
    """The failures of one engine."""

    def __init__(self, coordinator: Coordinator, timeout: float) -> None:
        """timeout: seconds that a native all-reduce may take."""
        self._coordinator, self._timeout = coordinator, timeout
        self._name = coordinator.ranks[coordinator.rank]
        self._first: BaseException | None = None
        self._by = ""  # the operation that failed first
        self._gone_since: float | None = None

    @property
    def first(self) -> str | None:
        """Text on the first failure; None if there is none."""
        return None if self._first is None else f"{self._by} failed: {self._first}"

    def refuse(self) -> None:
        """Raise SyncError after a failure: no step may follow."""
        if self._first is not None:
            raise SyncError(self.first) from self._first

    def record(self, error: BaseException, what: str) -> Exception:
        """Record the first failure, and tell the other ranks; return it as an error of hipress."""
        self._coordinator.fail(error)  # others would see only a broken connection
        if not isinstance(error, CasyncError | HipressError):
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                text = f"interrupted by a {type(error).__name__}"
            error = SyncError(f"rank {self._name}: {text}")
        self._first, self._by = copy_to_raise(error), what
        return error

    def not_begun(self, error: Exception, step: int) -> Exception:
        """The error for a bucket that could not be handed over."""
        if isinstance(error, CasyncError | HipressError):
            return error
        what = f"the bucket could not be handed over: {type(error).__name__}: {error}"
        named = SyncError(f"{self._where(step)}: {what}")
        named.__cause__ = error
        return named

    def not_averaged(self, error: Exception, step: int) -> Exception:
        """The error of a bucket: unchanged, but torch's (of a native all-reduce) with its place."""
        if isinstance(error, CasyncError | HipressError):
            return error
        what = f"{self._where(step)}: the all-reduce of uncompressed gradients"
        return transport_error(error, what, self._timeout)

    def explain(self, error: Exception, step: int) -> Exception:
        """The error with what is known of other ranks that caused it."""
        named = self._coordinator.named(error, f"step {step}")
        if isinstance(named, RankLost) and " ended during " in str(named).partition("\n")[0]:
            named.add_note(UNEVEN)
        return named

    def refuse_gone(self) -> None:
        """Raise TransportError if a rank ended so long ago that its data will not come: see
        [Note: a peer that is gone] in casync/runtime/threads.py."""
        gone, now = self._coordinator.gone(), time.monotonic()
        self._gone_since = None if gone is None else (self._gone_since or now)
        if gone is not None and now - (self._gone_since or now) > LOOK * REDUCE_LOOKS:
            what = f"{gone.told()}, and this rank waits for its data"
            raise TransportError(f"rank {self._name}: {what}")

    def finished(self) -> None:
        """Count a wait that was not in vain: [Note: leaving] in ranks/epoch.py."""
        self._coordinator.mailbox.finish()

    def close(self) -> None:
        """Tell the others how many there were."""
        self._coordinator.mailbox.epoch.tell_finished()

    def refuse_parted(self, failed: torch.optim.Optimizer, step: int) -> None:
        """Raise SyncError if this optimizer failed, but not on all ranks."""
        what = f"the step of {type(failed).__name__} before step {step}"
        others = self._coordinator.silent(what)  # ranks on which it did not fail
        if others:
            names = ", ".join(map(str, others))
            raise SyncError(
                f"{what} raised an error, or was interrupted, on rank {self._name} and not on "
                f"rank {names}: their parameters differ"
            )

    def _where(self, step: int) -> str:
        return f"rank {self._name}, step {step}"
