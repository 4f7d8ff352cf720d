"""Futures of averages: of the native all-reduce, mapped, and with time-outs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.errors import copy_to_raise, fail_future
from casync.transports.distributed import start_all_reduce

#: seconds between the looks of a wait
POLL_SECONDS = 1.0


def average(
    buffer: torch.Tensor, group: dist.ProcessGroup, timeout: float | None = None
) -> Future[torch.Tensor]:
    """Average like DDP without a hook: scale, then the native all-reduce; in place.

    timeout: seconds, instead of the group's.
    """
    buffer.div_(group.size())
    options = dist.AllreduceOptions()  # dist.all_reduce has no argument for them
    if timeout is not None:
        options.timeout = timedelta(seconds=timeout)
    return start_all_reduce(buffer, group, options, "the all-reduce of uncompressed gradients")


def map_future(
    future: Future[Any], use: Callable[[Any], torch.Tensor], used: Future[torch.Tensor]
) -> Future[torch.Tensor]:
    """Like `Future.then`, but an exception stays as it is. Returns `used`, which must be new."""

    def pass_on(done: Future[Any]) -> None:
        try:
            used.set_result(use(done.value()))
        except Exception as error:
            fail_future(used, error)

    future.add_done_callback(pass_on)
    return used


def wait_within(
    future: Future[Any], seconds: float | None, look: Callable[[], None] = lambda: None
) -> None:
    """Like `Future.wait`, but raises TimeoutError after `seconds`, and calls `look` in between.

    `look` may raise.
    The wait is in short turns: a Ctrl-C that arrives as a wait for a lock begins shows only after
    it.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    end = math.inf if seconds is None else time.monotonic() + seconds
    while not done.wait(max(0.0, min(POLL_SECONDS, end - time.monotonic()))):
        look()
        if time.monotonic() >= end:
            raise TimeoutError(f"timed out after {seconds:g} s")
    try:
        future.wait()
    except Exception as error:  # the future keeps it: drop the callers' frames
        error.__traceback__ = None
        raise copy_to_raise(error) from error.__cause__
