"""An epoch: the time in which the ranks of a store do not change.

[Note: epochs] Ranks that make their process groups anew (after a failure, or with other members)
begin a new epoch: its keys in the store, its notes and its door are its own, so none hears what an
earlier one was told. The ranks of a store agree on a name by which keys and notes begin, drawn at
random by the first to come. A rank that comes again to the same store, with all others, finds that
it has been in its first epoch, and joins the second.

[Note: presence] A killed process tells nobody, and the job's store does not notice, or ends with
it. So each rank opens a door (door.py), and adds its address to a list. The others connect to it.
When a process ends, in whatever way, the kernel closes the connection; the connection of a busy or
stopped process stays open. On that connection a process also tells the others why it cannot go on,
so they hear it even if the store has ended. If no connection can be made (a firewall, for example),
the store and the time-outs remain.

[Note: leaving] A rank whose last sums are there may end while others still receive theirs from a
third, over a slow link: it has sent all that they need. So a rank counts the waits for its group
that were not in vain, and tells the counts as it detaches or ends in order. Whoever waits for what
that rank had finished goes on waiting; for all else it is gone. That is told at the door alone, so
ranks connect early: see `watch` in job.py.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from casync.shutdown import aside
from hipress import compat
from hipress.compat import Store
from hipress.ranks import liveness
from hipress.ranks.door import Door
from hipress.ranks.liveness import Liveness, Watched
from hipress.ranks.stop import Stop
from hipress.ranks.store import add_line, call_store, read_lines

__all__ = ["Epoch", "epoch_of"]


class Epoch:
    """A rank's knowledge of the others in a store. Ranks are global numbers."""

    store: Store  # on a connection of its own
    name: str

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.meetings: Counter[str] = Counter()  # this rank's coordinators, by name
        self.present: dict[int, Liveness] = {}  # other ranks that have come
        self.lost: Stop | None = None  # told of ranks that ended
        self.finished: Counter[str] = Counter()  # by group: see [Note: leaving]
        self._token = secrets.token_hex(8)
        self._joined, self._joining = False, threading.Lock()  # threads may come at once
        self._door: Door | None = None
        self._watched: dict[int, Watched] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _disconnect, self._watched).atexit = False
        _OPEN.add(self)

    def join(self, store: Store, deadline: float) -> None:
        """Come to the store, once; may be repeated after an error. Raises the errors of
        `call_store`."""
        with self._joining:
            if not self._joined:
                self._join(store, deadline)

    def _join(self, store: Store, deadline: float) -> None:
        self.store = call_store(store, compat.another_client, deadline, self.rank)
        self.name = call_store(self.store, self._named, deadline, self.rank)
        self._open_door()
        call_store(self.store, self._come, deadline, self.rank)
        self._joined = True

    @property
    def number(self) -> int:
        """A number that its ranks share, and those of another epoch hardly."""
        return int(self.name, 16)

    def meet(self, ranks: Iterable[int], store: Store) -> None:
        """Read in the store who has come, unless all of these ranks have been seen."""
        if {*ranks} - self.present.keys():
            come = {rank: Liveness(**facts) for rank, facts in read_lines(store, self._presence)}
            come.pop(self.rank, None)
            self.present = come | self.present

    def tell(self, key: str, facts: Any) -> None:
        """Send a note to all processes that watch this one."""
        if self._door is not None:
            self._door.tell(key, facts)

    def heard(self, ranks: Iterable[int]) -> dict[str, Any]:
        """Notes that ranks have sent so far, by key."""
        return {k: v for one in self._looked(ranks) for k, v in one.notes.items()}

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Ranks that have come and whose processes are known to have ended, or to have left the
        epoch; the first call only connects to them."""
        return [one.rank for one in self._looked(ranks) if one.ended]

    def reached(self, ranks: Iterable[int]) -> bool:
        """True once all of these ranks are watched: each later note of theirs will be heard."""
        ranks = [*ranks]
        return sum(one.reached for one in self._looked(ranks)) == len(ranks)

    def died(self) -> list[int]:
        """Ranks whose processes ended without leaving the epoch before."""
        everyone = self._looked([*self.present])
        return [one.rank for one in everyone if one.ended and not one.left]

    def finished_by(self, rank: int, name: str) -> int:
        """Waits of a group that a rank had finished as it detached or left; 0 for others."""
        return sum(one.finished.get(name, 0) for one in self._looked([rank]))

    def tell_finished(self) -> None:
        """Tell the others what this rank has finished, before it detaches."""
        if self._door is not None:
            self._door.tell_finished()

    def forget(self) -> None:
        """Close all connections in a forked child: it would keep its parent's open."""
        _disconnect(self._watched)
        if self._door is not None:
            self._door.forget()
        self.present, self._door = {}, None
        self._lock, self._joining = threading.Lock(), threading.Lock()

    def _named(self, store: Store) -> str:
        """The name of this rank's first epoch in the store that it has not been in before."""
        for number in itertools.count(1):
            key = f"hipress/epochs/{number}"
            if _claim(store, f"{key}/{self.rank}", self._token) == self._token:
                return _claim(store, key, self._token)
        raise AssertionError

    def _come(self, store: Store) -> None:
        """Tell the store that this rank has come, and read who has: the store may end before the
        first look at it."""
        if self._door is not None:
            add_line(store, self._presence, [self.rank, asdict(self._door_here(self._door))])
        self.meet([self.rank], store)

    def _open_door(self) -> None:
        host = compat.store_host(self.store)
        if host is None or self._door is not None:
            return
        try:
            self._door = Door(liveness.open_to(liveness.address_towards(host)), self.finished)
        except OSError:  # no such route, or no more sockets: it cannot be watched
            return
        weakref.finalize(self, aside, self._door.close).atexit = False  # a door closes itself then

    def _door_here(self, door: Door) -> Liveness:
        own = liveness.address_towards(compat.store_host(self.store) or "localhost")
        host = None if liveness.loops(own) else own
        return Liveness(host, door.port, socket.gethostname(), door.token)

    def _looked(self, ranks: Iterable[int]) -> list[Watched]:
        """Connections to those that have come, with all that has arrived by now."""
        with self._lock:
            watched = []
            for rank in ranks:
                if rank in self.present and rank not in self._watched:
                    host = self.present[rank].host or compat.store_host(self.store) or "localhost"
                    self._watched[rank] = Watched(rank, self.present[rank], host)
                if rank in self._watched:
                    self._watched[rank].look()
                    watched.append(self._watched[rank])
            return watched

    @property
    def _presence(self) -> str:
        """Key of a line for each rank that has come."""
        return f"hipress/{self.name}/present"


def epoch_of(store: Store, rank: int) -> Epoch:
    """The epoch of this rank in a store, which it may have to join yet."""
    with _LOCK:
        epochs = _EPOCHS.setdefault(store, {})
        if rank not in epochs:
            epochs[rank] = Epoch(rank)
        return epochs[rank]


def _disconnect(watched: dict[int, Watched]) -> None:
    """Close and remove these connections."""
    while watched:
        watched.popitem()[1].close()


def _claim(store: Store, key: str, value: str) -> str:
    """The value of a key: this one, if it had none."""
    claimed: bytes = store.compare_set(key, "", value)
    return claimed.decode()


#: epochs by store and rank; they do not refer to these stores, with which they end
_EPOCHS: weakref.WeakKeyDictionary[Store, dict[int, Epoch]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
_OPEN: weakref.WeakSet[Epoch] = weakref.WeakSet()


def _forget_all() -> None:
    global _LOCK
    _LOCK = threading.Lock()  # the old one may be another thread's
    for each in [*_OPEN]:
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
