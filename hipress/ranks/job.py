"""The first rank of the whole job that ended, as a note on this rank's final error.

A rank also waits in other collectives, such as those of FSDP and DDP, with ranks outside of all its
hipress groups. Their errors name no rank. So the ranks of the job watch each other's processes (see
[Note: presence] in epoch.py), and the first that is seen to end is told to all others.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from contextlib import suppress
from functools import partial

import torch.distributed as dist

from casync.shutdown import start_thread
from hipress import compat
from hipress.compat import Store
from hipress.errors import HipressError
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.mailbox import TELL_SECONDS, StoreMailbox, backoff

KNOWN_SECONDS = 120.0  # seconds at most until all ranks of the job have arrived
_JOBS: weakref.WeakKeyDictionary[Store, Coordinator] = weakref.WeakKeyDictionary()
_ending = threading.Event()  # the interpreter ends: begin no more calls of a store
atexit.register(_ending.set)


def watch() -> None:
    """Watch the other ranks' processes from now on, as they arrive."""
    store = compat.job_store()
    if store in _JOBS:
        return
    with suppress(HipressError):  # a store that has ended
        ranks = range(dist.get_world_size())
        job = Coordinator.on(store, dist.get_rank(), ranks, "job", TELL_SECONDS)
        _JOBS[store] = job
        if compat.store_host(store) is None:  # nobody has a door, so nobody can be watched
            return
        known = weakref.ref(job.mailbox)
        start_thread(partial(_know, known), "hipress-job")


def cause(since: float | None = None) -> str:
    """A sentence on the rank of the job that ended first; "" if none is known to have ended. since:
    time at which an operation failed; by default now."""
    job = _current()
    reason = None if job is None else job.reason(since)
    if job is None or reason is None:
        return ""
    job.mailbox.stop(job.round, reason)
    return reason.told()


def fail(error: BaseException) -> None:
    """Tell the others the error by which this rank ends, unless another rank ended before."""
    job = _current()
    if job is not None:
        job.fail(error)


def _current() -> Coordinator | None:
    """The coordinator of all ranks; None if they are not watched, or have no process group."""
    return _JOBS.get(compat.job_store()) if dist.is_initialized() else None


def _know(known: weakref.ref[StoreMailbox]) -> None:
    """Connect to all ranks as they arrive."""
    end = time.monotonic() + KNOWN_SECONDS
    with suppress(HipressError):
        for pause in backoff():
            mailbox = known()
            if mailbox is None or mailbox.reached() or time.monotonic() > end:
                return
            mailbox.look("present", (), end)
            del mailbox
            if _ending.wait(pause):
                return
