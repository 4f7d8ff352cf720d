"""Notes that the ranks of a group write for each other, into a store and at their doors."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from hipress.compat import Store
from hipress.errors import HipressError
from hipress.ranks.epoch import Epoch
from hipress.ranks.stop import Stop
from hipress.ranks.store import call_store, read_notes

TELL_SECONDS = 2.0  # seconds at most to tell the others of a failure
T = TypeVar("T")
log = logging.getLogger("hipress")


@dataclass(eq=False)
class StoreMailbox:
    """A namespace in an epoch. A note belongs to a round, or to a named event."""

    epoch: Epoch
    rank: int  # within the group
    ranks: tuple[int, ...]  # global numbers, by rank within the group
    name: str
    silent: bool = False  # True if the store did not answer the last call

    @property
    def here(self) -> int:
        """Global number of this rank."""
        return self.ranks[self.rank]

    @property
    def store(self) -> Store:
        """The epoch's store."""
        return self.epoch.store

    @property
    def others(self) -> list[int]:
        """Numbers within the group of all ranks but this one."""
        return [rank for rank in range(len(self.ranks)) if rank != self.rank]

    def post(
        self, round_: int | str, place: int | str, facts: Mapping[str, Any], deadline: float
    ) -> None:
        """Write a note."""
        key, text = self._key(round_, place), json.dumps(facts, sort_keys=True, default=str)
        self._call(lambda store: store.set(key, text), deadline)

    def forget(self, round_: int) -> None:
        """Delete this rank's note of a round that all have read, if the store can: those that are
        written in Python cannot."""
        key, end = self._key(round_, self.rank), time.monotonic() + TELL_SECONDS
        with suppress(HipressError):
            call_store(self.store, lambda store: store.delete_key(key), end, self.here)

    def tell(self, round_: int | str, facts: Mapping[str, Any]) -> None:
        """Post this rank's note, if the store answers, and send it to watching processes."""
        self.epoch.tell(self._key(round_, self.rank), facts)
        if not self.silent:
            with unless_silent():
                self.post(round_, self.rank, facts, time.monotonic() + TELL_SECONDS)

    def stop(self, round_: int, stop: Stop) -> None:
        """Post the reason to stop, or an earlier one, if the store answers, and send it to watching
        processes: [Note: stopping] in coordinator.py."""
        deadline = time.monotonic() + TELL_SECONDS
        with unless_silent():
            first = self.heard(round_, ())[1]
            if first is None and not self.silent:
                first = self.look(round_, (), deadline)[1]
                if first is None:
                    self.post(round_, "stop", asdict(stop), deadline)
            stop = first or stop
        if stop.ended:
            self.epoch.lost = self.epoch.lost or stop
        self.epoch.tell(self._key(round_, "stop"), asdict(stop))

    def look(
        self, round_: int | str, ranks: Sequence[int], deadline: float, *, some: bool = True
    ) -> tuple[dict[int, dict[str, Any]], Stop | None]:
        """Notes of these ranks posted by now, by rank, and the stop if a rank has posted one.
        some: False for the notes of all or none: see [Note: polling] in store.py."""
        keys = {rank: self._key(round_, rank) for rank in ranks}

        def call(store: Store) -> tuple[dict[int, Any], dict[str, Any]]:
            notes = read_notes(store, keys, some=some)  # first: who has posted has come
            self.epoch.meet(self._all_others, store)
            return notes, read_notes(store, {"stop": self._key(round_, "stop")})

        found, stop = self._call(call, deadline)
        return found, Stop(**stop["stop"]) if stop else self.heard(round_, ())[1]

    def known(
        self, round_: int | str, missing: Sequence[int], deadline: float
    ) -> tuple[dict[int, dict[str, Any]], Stop | None]:
        """Like `look`; like `heard` from the moment that the store does not answer."""
        if not self.silent:
            with suppress(HipressError):
                return self.look(round_, missing, deadline)
        return self.heard(round_, missing)

    def heard(
        self, round_: int | str, missing: Sequence[int]
    ) -> tuple[dict[int, dict[str, Any]], Stop | None]:
        """Like `look`, but from notes that other processes sent to this one, without the store."""
        notes = self.epoch.heard(self._all_others)
        keys = {rank: self._key(round_, rank) for rank in missing}
        stop = notes.get(self._key(round_, "stop"))
        return {r: notes[key] for r, key in keys.items() if key in notes}, stop and Stop(**stop)

    def ended(self) -> list[int]:
        """Ranks that have come and are known to have ended."""
        return [self.ranks.index(rank) for rank in self.epoch.ended(self._all_others)]

    def reached(self) -> bool:
        """True once all other ranks are watched."""
        return self.epoch.reached(self._all_others)

    def missed(self) -> list[int]:
        """Ranks that ended before they had finished what this one waits for."""
        return [rank for rank in self.ended() if not self.has_finished(rank)]

    def has_finished(self, rank: int) -> bool:
        """True if a rank told, as it detached or left, that it had finished what this one waits
        for: [Note: leaving] in epoch.py."""
        finished = self.epoch.finished_by(self.ranks[rank], self.name)
        return finished > self.epoch.finished[self.name]

    def finish(self) -> None:
        """Count a wait for the other ranks that was not in vain."""
        self.epoch.finished[self.name] += 1

    def came(self, rank: int) -> bool:
        """True if a rank is known to have come to the epoch."""
        return self.ranks[rank] in self.epoch.present

    def lost(self, ended: Sequence[int]) -> Stop:
        """The stop for ranks that have ended."""
        gone = {self.ranks[rank] for rank in ended} | set(self.epoch.died())
        names = ", ".join(map(str, sorted(gone)))
        return Stop("RankLost", f"rank {names} ended", ended=True)

    def of(self, some: Sequence[int]) -> StoreMailbox:
        """The mailbox of a subset of these ranks, which must include this one."""
        name = f"{self.name}/{','.join(map(str, some))}"
        ranks = tuple(self.ranks[rank] for rank in some)
        return StoreMailbox(self.epoch, some.index(self.rank), ranks, name)

    @property
    def _all_others(self) -> list[int]:
        """Global numbers of the others."""
        return [self.ranks[rank] for rank in self.others]

    def _key(self, round_: int | str, place: int | str) -> str:
        return f"hipress/{self.epoch.name}/{self.name}/{round_}/{place}"

    def _call(self, call: Callable[[Store], T], deadline: float) -> T:
        try:
            answer = call_store(self.store, call, deadline, self.here)
        except HipressError:
            self.silent = True
            raise
        self.silent = False
        return answer


@contextmanager
def unless_silent() -> Iterator[None]:
    """Log, rather than raise, a failure to tell the others: it must not replace the first error."""
    try:
        yield
    except HipressError as error:
        log.warning("the other ranks could not be told of a failure: %s", error)


def backoff() -> Iterator[float]:
    """Pauses in seconds: short at first, as ranks mostly arrive together, then up to 0.1."""
    pause = 0.001
    while True:
        yield pause
        pause = min(pause * 1.5, 0.1)
