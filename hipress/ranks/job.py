"""The first rank of the whole job that ended, as a note on this rank's final error.

A rank also waits in other collectives, such as those of FSDP and DDP, with ranks outside of all its
hipress groups. Their errors name no rank. So the ranks of the job watch each other's processes (see
[Note: presence]), and the first that is seen to end is told to all others.
"""

from __future__ import annotations

import threading
import time
from concurrent import futures
from contextlib import suppress

import torch.distributed as dist

from hipress import compat
from hipress.errors import HipressError
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.mailbox import TELL_SECONDS, StoreMailbox, backoff
from hipress.ranks.store import run_in_thread

KNOWN_SECONDS = 120.0  # seconds at most until all ranks of the job have arrived
_JOBS: dict[int, Coordinator] = {}  # by identity of the store: one, unless a job begins anew


def watch() -> None:
    """Watch the other ranks' processes from now on, as they arrive."""
    store = compat.job_store()
    if id(store) in _JOBS:
        return
    _JOBS.clear()
    # a store without an address; or one that has ended, for which torch tries for five minutes
    with suppress(HipressError, RuntimeError, AttributeError, futures.TimeoutError):
        own = run_in_thread(lambda: compat.another_client(store)).result(TELL_SECONDS)
        board = StoreMailbox(own, dist.get_rank(), tuple(range(dist.get_world_size())), "job")
        board.announce(time.monotonic() + TELL_SECONDS)
        _JOBS[id(store)] = Coordinator(board, TELL_SECONDS)
        threading.Thread(target=_know, args=(board,), name="hipress-job", daemon=True).start()


def cause(since: float | None = None) -> str:
    """A sentence on the rank of the job that ended first; "" if none is known to have ended. since:
    time at which an operation failed; by default now."""
    for job in _JOBS.values():
        reason = job.reason(since)
        if reason is not None:
            job.board.stop(job.round, reason)
            return reason.told()
    return ""


def fail(error: BaseException) -> None:
    """Tell the others the error by which this rank ends, unless another rank ended before."""
    for job in _JOBS.values():
        job.fail(error)


def _know(board: StoreMailbox) -> None:
    """Connect to all ranks as they arrive."""
    end = time.monotonic() + KNOWN_SECONDS
    with suppress(HipressError):
        for pause in backoff():
            board.look("present", (), end)
            board.ended()
            if len(board.present) == len(board.others) or time.monotonic() > end:
                return
            time.sleep(pause)
