"""Calls to the job's key-value store, with a deadline.

[Note: a store that does not answer] A call to a TCPStore waits for the reply of its host for ever,
whatever the store's own time-out: a host that is stopped or cut off holds up all ranks. So each
call is made in a thread of its own, and the caller waits for it until the deadline only. The thread
cannot be ended; while it waits, the store is not used again, since its next reply belongs to that
call. It does not delay the exit, and torch releases the GIL around the call. Until that reply
comes, calls on other connections to the same host fail at once: a rank that explains a failure asks
several times, and would wait as often.

[Note: polling] Ranks that wait for each other's notes ask again and again whether all are there, in
one request; for a note of each rank only to name the missing ones, at the end. The store's own
`wait` tells neither who is missing nor that a rank has posted a stop, and torch prints two warnings
at the end of each time-out.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from casync.shutdown import start_thread
from hipress import compat
from hipress.compat import Store
from hipress.errors import AgreementTimeout, HipressError

MIN_CALL_SECONDS = 2.0  # least seconds of a call, however little is left of a time-out
MOMENT = 0.5  # seconds to wait for an answer that is on its way
K = TypeVar("K")
T = TypeVar("T")

# Calls without an answer in time, which may still wait.
_UNANSWERED: weakref.WeakKeyDictionary[Store, Future[Any]] = weakref.WeakKeyDictionary()
_SILENT: dict[str | None, Future[Any]] = {}  # the last one of each host, by address


def call_store(store: Store, call: Callable[[Store], T], deadline: float, rank: int) -> T:
    """Return `call(store)`. See [Note: a store that does not answer].

    Raises AgreementTimeout if that takes longer than until `deadline` (of time.monotonic()), or
    soon if an earlier call still waits, and HipressError for the store's own errors.
    """
    before, address = _UNANSWERED.get(store), compat.store_address(store)
    # after a KeyboardInterrupt its answer may be on its way
    waits = before is not None and wait([before], MOMENT).not_done
    if waits or (address in _SILENT and not _SILENT[address].done()):
        message = f"rank {rank} still waits for an earlier answer of the job's store"
        raise AgreementTimeout(message + _store_address(store))
    start = time.monotonic()
    outcome = run_in_thread(lambda: call(store))
    try:
        if wait([outcome], max(deadline - start, MIN_CALL_SECONDS)).not_done:
            wait([outcome], MOMENT)  # this process may have been stopped meanwhile
    finally:  # after a KeyboardInterrupt, too
        if not outcome.done():
            _UNANSWERED[store] = outcome
    if not outcome.done():
        if address is not None:
            _SILENT[address] = outcome
        message = f"rank {rank} waited {time.monotonic() - start:.3g} s for the job's store"
        raise AgreementTimeout(message + _store_address(store))
    try:
        return outcome.result()
    except RuntimeError as error:
        message = f"rank {rank} cannot use the job's store{_store_address(store)} ({error})"
        raise HipressError(message) from error


def read_notes(store: Store, keys: Mapping[K, str], *, some: bool = True) -> dict[K, Any]:
    """The values, as JSON, of those keys that are there; two requests where all are, and the store
    has requests of several keys. some: False for all or none, which spares a request for each."""
    there = dict(keys)
    if there and not store.check([*there.values()]):
        each = there.items() if some and len(there) > 1 else ()
        there = {name: key for name, key in each if store.check([key])}
    wanted = [*there.values()]
    several = wanted and compat.has_requests_of_several_keys(store)
    notes = store.multi_get(wanted) if several else [store.get(key) for key in wanted]
    return dict(zip(there, map(json.loads, notes), strict=True))


def add_line(store: Any, key: str, line: Any) -> None:
    """Add a line, as JSON, to a list in the store."""
    store.append(key, json.dumps(line) + "\n")


def read_lines(store: Store, key: str) -> list[Any]:
    """The lines of a list: two requests, however many there are; [] for no list."""
    return [*map(json.loads, store.get(key).splitlines())] if store.check([key]) else []


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call that may wait for ever in a thread of its own; the future of its result."""
    outcome: Future[T] = Future()
    start_thread(partial(fulfil, outcome, call), "hipress-call")
    return outcome


def fulfil(outcome: Future[T], call: Callable[[], T]) -> None:
    """Make the result of a call that of the future, or its error."""
    try:
        outcome.set_result(call())
    except BaseException as error:  # the waiting thread must not wait for ever
        outcome.set_exception(error)


def _store_address(store: Store) -> str:
    """Text for a message: the address of a store that does not answer, and possible causes."""
    address = compat.store_address(store)
    where = "" if address is None else f" at {address}"
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = "torchrun's agent, which keeps it," if agent else "its process (often rank 0)"
    return f"{where}, which does not answer: {keeper} has ended, is stopped or is cut off"
