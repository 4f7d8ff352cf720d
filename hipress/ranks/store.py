"""Calls to the job's key-value store, with a deadline.

[Note: a store that does not answer] A call to a TCPStore waits for the reply of its host for ever,
whatever the store's own time-out: a host that is stopped or cut off holds up all ranks. So each
call is made in a thread of its own, and the caller waits for it until the deadline only. The thread
cannot be ended; while it waits, the store is not used again, since its next reply belongs to that
call. It does not delay the exit, and torch releases the GIL around the call. A later call, also on
another connection to that host, first waits for that reply, but keeps MIN_CALL_SECONDS of its time
for itself: a host that is slow delays, and a rank that explains a failure, which asks several times
with little time, learns at once that there is no answer. If this process is stopped or gets no CPU
during a wait, at most MOMENT of that counts.

[Note: polling] Ranks that wait for each other's notes ask again and again whether all are there, in
one request; for a note of each rank only to name the missing ones, at the end. The store's own
`wait` tells neither who is missing nor that a rank has posted a stop, and torch prints two warnings
at the end of each time-out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

from casync.shutdown import start_thread
from hipress import compat
from hipress.compat import Store
from hipress.errors import AgreementTimeout, HipressError

MIN_CALL_SECONDS = 2.0  # least seconds of a call, however little is left of a time-out
MOMENT = 0.5  # seconds to wait for an answer that is on its way
_NO_LINES = " "  # no list is equal to it
K = TypeVar("K")
T = TypeVar("T")

# Calls without an answer in time, which may still wait, and when they began: to each host, by
# address; or to a store without one, by its id, which is taken as long as a call waits.
_UNANSWERED: dict[str | int, list[tuple[Future[Any], float]]] = {}


def call_store(store: Store, call: Callable[[Store], T], deadline: float, rank: int) -> T:
    """Return `call(store)`. See [Note: a store that does not answer].

    Raises AgreementTimeout if that takes longer than until `deadline` (of time.monotonic()), or if
    an earlier call still waits then, and HipressError for the store's own errors.
    """
    host = compat.store_address(store) or id(store)
    for earlier, since in _UNANSWERED.get(host, ()):
        if not _ends(earlier, max(deadline - MIN_CALL_SECONDS - time.monotonic(), 0.0)):
            raise _silence(store, rank, since, "an earlier answer of ")
    start = time.monotonic()
    outcome = run_in_thread(lambda: call(store))
    try:
        in_time = _ends(outcome, max(deadline - start, MIN_CALL_SECONDS))
    finally:  # after a KeyboardInterrupt, too
        if not outcome.done():
            waiting = [each for each in _UNANSWERED.get(host, ()) if not each[0].done()]
            _UNANSWERED[host] = [*waiting, (outcome, start)]
    if not in_time:
        raise _silence(store, rank, start)
    try:
        return outcome.result()
    except RuntimeError as error:
        message = f"rank {rank} cannot use the job's store{_store_address(store)} ({error})"
        raise HipressError(message) from error


def _ends(outcome: Future[Any], seconds: float) -> bool:
    """True if a call ends within as many seconds in which this process runs, and a MOMENT."""
    whole, rest = divmod(seconds, MOMENT)
    return any(wait([outcome], each).done for each in (rest, *repeat(MOMENT, int(whole) + 1)))


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
    """The lines of a list; [] for no list. One request, so that another rank may delete the list at
    any time: `get` would wait for a key that is deleted after a `check`."""
    lines = store.compare_set(key, _NO_LINES, _NO_LINES)  # changes nothing
    return [*map(json.loads, lines.strip().splitlines())]


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


def _silence(store: Store, rank: int, since: float, what: str = "") -> AgreementTimeout:
    """The error of a rank that has waited since a time for what the store does not answer."""
    waited = f"rank {rank} waited {time.monotonic() - since:.3g} s for {what}the job's store"
    return AgreementTimeout(waited + _store_address(store))


def _store_address(store: Store) -> str:
    """Text for a message: the address of a store that does not answer, and possible causes."""
    address = compat.store_address(store)
    where = "" if address is None else f" at {address}"
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = "torchrun's agent, which keeps it," if agent else "its process (in a job often rank 0)"
    causes = "has ended, is stopped or cut off, or gets no time on a busy machine"
    return f"{where}, which does not answer: {keeper} {causes}"
