"""Ranks compare their configurations before the first gradient moves.

[Note: agreement]
Two ranks that run different codecs would read each other's bytes as nonsense, or wait for ever.
So at attach time each rank writes its configuration, as JSON, into the job's key-value store
(the one of `init_process_group`), and reads everybody else's. No process group is needed, which
is the point: a collective that one rank never joins cannot say who is missing; the store can.
A rank whose own set-up failed writes that failure instead, so the others stop at once rather
than at the time-out. One that has waited in vain writes that, too, where all look last: who comes
later must not go on without it, and load a state, say, that it has not loaded.

[Note: a store that does not answer]
A call to a TCPStore waits for the reply of its host for ever, whatever the store's own time-out:
a host that is stopped, or cut off, holds up everybody. So each call is made in a thread of its
own, and whoever asked waits for it until the deadline only. The thread cannot be ended; while it
waits, the store is not used again, since its next reply belongs to that call. It is a daemon, which
holds up no exit, and torch releases the GIL around the call.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from hipress import compat
from hipress.compat import Store
from hipress.errors import AgreementTimeout, ConfigMismatch, HipressError

FAILED = "failed"
OWN = "own"  # what may differ between ranks
GAVE_UP = "gone"  # where a rank that no longer waits says so
MIN_CALL_SECONDS = 2.0  # seconds that a call to the store has, however little is left of a time-out
TELL_SECONDS = 10.0  # seconds at most to tell the others of a failure, which should be shown soon
SKEW_SECONDS = 2.0  # seconds within which ranks that wait in vain, as long as each other, say so
T = TypeVar("T")
log = logging.getLogger("hipress")


@dataclass(frozen=True)
class Meeting:
    """One place in the store where the ranks of a group compare notes, any number of times."""

    store: Store
    rank: int  # within the group
    ranks: tuple[int, ...]  # global numbers, by rank within the group
    timeout: float  # seconds
    name: str
    _round: Iterator[int] = field(default_factory=itertools.count)

    def of(self, some: Sequence[int]) -> Meeting:
        """The place where some of these ranks, of which this is one, compare notes."""
        name = f"{self.name}/{','.join(map(str, some))}"
        ranks = tuple(self.ranks[rank] for rank in some)
        return Meeting(self.store, some.index(self.rank), ranks, self.timeout, name)

    def settle(self, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
        """Return when every rank posted equal facts; by rank, what each has of its `own`.

        Raises ConfigMismatch naming the first differing fact and both sides, or
        AgreementTimeout naming the ranks that never arrived.
        """
        round_ = next(self._round)
        deadline = time.monotonic() + self.timeout
        self._post(round_, self.rank, {**facts, OWN: own}, deadline)
        posted = self._collect(round_, deadline)
        owned = [each.pop(OWN) for each in posted]
        _compare(posted, self.ranks)
        return owned

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on; they raise as they arrive.

        Where they cannot be told, that is logged: `error` is what matters.
        """
        facts = {FAILED: f"{type(error).__name__}: {error}"}
        self._tell(next(self._round), self.rank, facts)

    def tell(self, what: str) -> None:
        """Say that this rank waits for `what` no longer, for those that ask who is silent."""
        self._tell(_over_key(what), self.rank, {})

    def silent(self, what: str) -> list[int]:
        """Ranks that do not say, when this one does, that they wait for `what` no longer.

        Raises AgreementTimeout where the store does not answer.
        """
        deadline = time.monotonic() + SKEW_SECONDS
        missing = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        self._post(_over_key(what), self.rank, {}, deadline)
        for pause in _backoff():
            arrived, _ = self._arrived(_over_key(what), missing, deadline)
            missing = [rank for rank in missing if rank not in arrived]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(pause)
        return [self.ranks[rank] for rank in missing]

    def _tell(self, round_: int | str, place: int | str, facts: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + min(self.timeout, TELL_SECONDS)
        with _unless_silent():
            self._post(round_, place, facts, deadline)

    def _key(self, round_: int | str, place: int | str) -> str:
        return f"hipress/{self.name}/{round_}/{place}"

    def _post(
        self, round_: int | str, place: int | str, facts: Mapping[str, Any], deadline: float
    ) -> None:
        text = json.dumps(facts, sort_keys=True, default=str)
        self._call(lambda store: store.set(self._key(round_, place), text), deadline)

    def _collect(self, round_: int, deadline: float) -> list[dict[str, Any]]:
        """Everybody's facts; polls, because a store's own wait does not say who is missing."""
        missing = list(range(len(self.ranks)))
        found: dict[int, dict[str, Any]] = {}
        for pause in _backoff():
            arrived, gone = self._arrived(round_, missing, deadline)
            for rank, text in arrived.items():
                found[rank] = json.loads(text)
                missing.remove(rank)
                _raise_if_failed(found[rank], self.ranks[rank], self.ranks[self.rank])
            if gone is not None:
                message = json.loads(gone)["why"]
                raise AgreementTimeout(f"rank {self.ranks[self.rank]} stops, because {message}")
            if not missing:
                break
            if time.monotonic() > deadline:
                message = self._absent(missing)
                self._tell(round_, GAVE_UP, {"why": message})
                raise AgreementTimeout(message)
            time.sleep(pause)
        return [found[rank] for rank in range(len(self.ranks))]

    def _arrived(
        self, round_: int | str, missing: Sequence[int], deadline: float
    ) -> tuple[dict[int, bytes], bytes | None]:
        """What those of the missing posted who have arrived by now, and who waits no longer."""
        keys = {rank: self._key(round_, rank) for rank in missing}
        last = self._key(round_, GAVE_UP)

        def look(store: Store) -> tuple[dict[int, bytes], bytes | None]:
            found = {r: store.get(key) for r, key in keys.items() if store.check([key])}
            return found, store.get(last) if store.check([last]) else None

        return self._call(look, deadline)

    def _call(self, call: Callable[[Store], T], deadline: float) -> T:
        return call_store(self.store, call, deadline, self.ranks[self.rank])

    def _absent(self, missing: Sequence[int]) -> str:
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        return (
            f"rank {self.ranks[self.rank]} waited {self.timeout:g} s for rank {names} of "
            f"{len(self.ranks)}. Every rank must call hipress.wrap, attach and load_state_dict, "
            "the same number of times and in the same order."
        )


def meeting(group: dist.ProcessGroup, timeout: float) -> Meeting:
    """The next meeting of this group's ranks; each rank counts its meetings in the store."""
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank(group)
    place = ",".join(map(str, ranks))
    store = compat.job_store()
    key = f"hipress/{place}/meetings/{rank}"
    round_ = call_store(store, lambda it: it.add(key, 1), time.monotonic() + timeout, ranks[rank])
    return Meeting(store, rank, ranks, timeout, f"{place}/{round_}")


@contextmanager
def failures_told(group: dist.ProcessGroup) -> Iterator[None]:
    """What fails inside, before this rank's meeting, the others learn at theirs."""
    try:
        yield
    except Exception as error:
        with _unless_silent():
            meeting(group, TELL_SECONDS).fail(error)
        raise


# Calls that had no answer in time, and may be waiting still.
_UNANSWERED: weakref.WeakKeyDictionary[Store, threading.Thread] = weakref.WeakKeyDictionary()


def call_store(store: Store, call: Callable[[Store], T], deadline: float, rank: int) -> T:
    """What `call(store)` returns. See [Note: a store that does not answer].

    Raises AgreementTimeout where that takes longer than until `deadline` (of time.monotonic()),
    at once where an earlier call is waiting still, and HipressError for the store's own errors.
    """
    before = _UNANSWERED.get(store)
    if before is not None and before.is_alive():
        message = f"rank {rank} still waits for an earlier answer of the job's store"
        raise AgreementTimeout(message + _store_address(store))
    start = time.monotonic()
    thread, outcome = run_in_thread(lambda: call(store))
    try:
        thread.join(max(deadline - start, MIN_CALL_SECONDS))
    finally:  # after a KeyboardInterrupt, too
        if thread.is_alive():
            _UNANSWERED[store] = thread
    if not outcome.done():
        message = f"rank {rank} waited {time.monotonic() - start:.3g} s for the job's store"
        raise AgreementTimeout(message + _store_address(store))
    try:
        return outcome.result()
    except RuntimeError as error:
        raise HipressError(f"the job's store does not answer: {error}") from error


def run_in_thread(call: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    """A call that may never return, in a thread of its own."""
    outcome: Future[T] = Future()
    thread = threading.Thread(target=_call, args=(call, outcome), daemon=True)
    thread.start()
    return thread, outcome


def _call(call: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(call())
    except Exception as error:
        outcome.set_exception(error)


def _store_address(store: Store) -> str:
    """The end of a message: where a store is that does not answer."""
    address = compat.store_address(store)
    where = "" if address is None else f" at {address}"
    return f"{where}, which does not answer: the process that keeps it may be stopped or cut off."


@contextmanager
def _unless_silent() -> Iterator[None]:
    """An error is told to the others if the store answers, and never replaced."""
    try:
        yield
    except HipressError as error:
        log.warning("the other ranks could not be told of a failure: %s", error)


def _over_key(what: str) -> str:
    """Whose keys are apart from those of gloo, which has its own below `what`."""
    return f"{what} is over"


def _backoff() -> Iterator[float]:
    """Short at first, since ranks mostly arrive together, then easy on the store."""
    pause = 0.001
    while True:
        yield pause
        pause = min(pause * 1.5, 0.1)


def _raise_if_failed(facts: Mapping[str, Any], rank: int, here: int) -> None:
    if FAILED in facts:
        raise ConfigMismatch(f"rank {rank} failed, so rank {here} stops, too: {facts[FAILED]}")


def _compare(posted: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Raise ConfigMismatch for the first fact on which a rank differs from the group's first."""
    for other in range(1, len(posted)):
        for key in sorted({*posted[0], *posted[other]}, key=_order):
            left, right = posted[0].get(key), posted[other].get(key)
            if key == "digests":
                sides = left or {}, right or {}
                # what a rank calls a spec, or where it found it, does not matter
                if sorted(sides[0].values()) != sorted(sides[1].values()):
                    raise ConfigMismatch(_other_text(*sides, ranks[0], ranks[other]))
            elif left != right:
                what, mine, yours = _narrow(key, left, right)
                raise ConfigMismatch(
                    f"ranks disagree on {what}: rank {ranks[0]}: {mine}, "
                    f"rank {ranks[other]}: {yours}"
                )


def _other_text(left: Mapping[str, str], right: Mapping[str, str], one: int, other: int) -> str:
    """Which codec has another text, or other parameters, on another rank."""
    name = min(n for n in {*left, *right} if left.get(n) != right.get(n))
    digests = " and ".join(str(side.get(name, "none"))[:12] for side in (left, right))
    return (
        f"{name} differs between ranks {one} and {other} (digests {digests}); "
        "give every rank the same text and parameters"
    )


def _order(key: str) -> tuple[bool, bool, str]:
    """What a reader recognizes first: the codec, then options, then digests and the plan."""
    return (key != "compressor", key in ("digests", "plan"), key)


def _narrow(key: str, left: Any, right: Any) -> tuple[str, str, str]:
    """The differing entry when both sides are lists: one parameter, not all of them."""
    if not (isinstance(left, list) and isinstance(right, list)):
        return key, str(left), str(right)
    for index, (mine, yours) in enumerate(itertools.zip_longest(left, right)):
        if mine != yours:
            absent = "nothing"
            return f"{key}, entry {index}", str(mine or absent), str(yours or absent)
    return key, str(left), str(right)
