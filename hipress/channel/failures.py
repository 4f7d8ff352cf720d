"""The failure scope of channels: the first error ends them all, and no step may follow.

Whoever has one watches the other ranks of the job, and tells them of an uncaught exception.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.errors import CasyncError, TransportError, copy_to_raise
from casync.runtime.threads import LOOK, REDUCE_LOOKS
from casync.transports.distributed import transport_error
from hipress import compat
from hipress.channel.futures import wait_within
from hipress.errors import HipressError, RankLost, SyncError
from hipress.ranks import job
from hipress.ranks.coordinator import Coordinator

#: a note on the error of ranks that go on after another one has ended
UNEVEN = (
    "If it had come to the end of its data before this rank: train within DDP's "
    "`with model.join():`, or take the same number of steps on every rank"
)
#: those that are not closed
_OPEN: weakref.WeakSet[Failures] = weakref.WeakSet()


class Failures:
    """The failures of channels that end together."""

    def __init__(self, coordinator: Coordinator, timeout: float, unit: str = "step") -> None:
        """timeout: seconds that a native all-reduce may take. unit: word for what is numbered."""
        self.coordinator, self._timeout, self._unit = coordinator, timeout, unit
        self._name = coordinator.ranks[coordinator.rank]
        self._first: BaseException | None = None
        self._by = ""  # the operation that failed first
        self._gone_since: float | None = None
        self._ends: list[Callable[[Exception], None]] = []
        self.waited = 0.0  # seconds in `waiting`
        if dist.is_initialized():  # else there is no job
            job.watch()
        _tell_uncaught()
        _OPEN.add(self)

    @property
    def first(self) -> str | None:
        """Text on the first failure; None if there is none."""
        return None if self._first is None else f"{self._by} failed: {self._first}"

    def refuse(self) -> None:
        """Raise SyncError after a failure: no step may follow."""
        if self._first is not None:
            raise SyncError(self.first) from self._first

    def ends(self, abort: Callable[[Exception], None]) -> None:
        """Call this with the first failure: it ends a channel, or what depends on it."""
        self._ends.append(abort)

    def abort(self, error: Exception) -> None:
        """End all channels, so that other ranks learn of the error at once."""
        for abort in self._ends:
            abort(error)

    def fail(self, error: BaseException, step: int, what: str = "") -> BaseException:
        """End all channels, since `what` failed, by default this step, maybe on this rank only.

        The first failure counts. Returns the error by which this rank ends: an Exception with what
        is known of other ranks that caused it.
        """
        if self._first is not None:
            return error
        named = self.explain(error, step) if isinstance(error, Exception) else error
        self.end(named, what or f"{self._unit} {step}")
        return named

    def end(self, error: BaseException, what: str) -> None:
        """The same by an error that needs no explanation."""
        self.coordinator.fail(error)  # others would see only a broken connection
        told = error
        if not isinstance(told, CasyncError | HipressError):
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                text = f"interrupted by a {type(error).__name__}"
            told = SyncError(f"rank {self._name}: {text}")
        self._first, self._by = copy_to_raise(told), what
        self.abort(told)

    @contextmanager
    def scope(self, step: int, what: str = "") -> Iterator[None]:
        """A context whose error ends all channels: see `fail`."""
        try:
            yield
        except BaseException as error:
            raise self.fail(error, step, what) from error.__cause__

    @contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """The same for a wait, which is timed; a native all-reduce's error tells its place."""
        start = time.perf_counter()
        with self.scope(step):
            try:
                yield
            except Exception as error:
                error.__traceback__ = None  # a future keeps the error, and would keep the callers
                raise self.not_averaged(error, step) from error.__cause__
        self.waited += time.perf_counter() - start

    def wait(self, future: Future[Any], seconds: float | None = None) -> None:
        """Wait for a future, and look meanwhile for ranks that are gone. Within `waiting`.
        seconds: None if the future has a time-out of its own."""
        wait_within(future, seconds, self.refuse_gone)

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
        named = self.coordinator.named(error, f"{self._unit} {step}")
        ended = isinstance(named, RankLost) and " ended during " in str(named).partition("\n")[0]
        if ended and UNEVEN not in getattr(named, "__notes__", ()):
            named.add_note(UNEVEN)
        return named

    def refuse_gone(self) -> None:
        """Raise TransportError if a rank ended so long ago that its data will not come: see
        [Note: a peer that is gone] in casync/runtime/threads.py."""
        gone, now = self.coordinator.gone(), time.monotonic()
        self._gone_since = None if gone is None else (self._gone_since or now)
        if gone is not None and now - (self._gone_since or now) > LOOK * REDUCE_LOOKS:
            what = f"{gone.told()}, and this rank waits for its data"
            raise TransportError(f"rank {self._name}: {what}")

    def finished(self) -> None:
        """Count a wait that was not in vain: [Note: leaving] in ranks/epoch.py."""
        self.coordinator.mailbox.finish()

    def close(self) -> None:
        """Tell the others how many there were; no uncaught exception matters to them any more. May
        repeat."""
        self.coordinator.mailbox.epoch.tell_finished()
        _OPEN.discard(self)

    def refuse_parted(self, failed: torch.optim.Optimizer, step: int) -> None:
        """Raise SyncError if this optimizer failed, but not on all ranks."""
        what = f"the step of {type(failed).__name__} before step {step}"
        others = self.coordinator.silent(what)  # ranks on which it did not fail
        if others:
            names = ", ".join(map(str, others))
            raise SyncError(
                f"{what} raised an error, or was interrupted, on rank {self._name} and not on "
                f"rank {names}: their parameters differ"
            )

    def _where(self, step: int) -> str:
        return f"rank {self._name}, {self._unit} {step}"


@functools.cache
def _tell_uncaught() -> None:
    """From now on, tell the other ranks of an exception that ends this program; otherwise they
    would see only a broken connection. If another rank is gone, a note on the exception says so."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        whole = [each for each in _OPEN if each.first is None]
        if whole and compat.is_collective(error):
            error.add_note(_tell_gone(whole[0].coordinator) or "no rank is known to be gone")
        before(kind, error, trace)
        if hasattr(sys, "ps1"):  # at a prompt the error ends only a line
            return
        job.fail(error)
        for each in whole:
            each.end(error, "the program")

    sys.excepthook = hook


def _tell_gone(coordinator: Coordinator) -> str:
    """A sentence on who is gone, of all ranks of the job; "" if nothing is known."""
    since = time.monotonic()
    coordinator.tell("the program")
    return job.cause(since) or coordinator.cause("the program", since)
