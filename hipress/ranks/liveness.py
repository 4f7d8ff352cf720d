"""Liveness of ranks' processes, and the notes that they send.

[Note: presence] A killed process tells nobody, and the job's store does not notice, or ends with
it. So each process has a door (door.py), and posts its address when it meets the others. The
others connect to it. When a process ends, in whatever way, the kernel closes the connection; the
connection of a busy or stopped process stays open. On that connection a process also tells the
others why it cannot go on, so they hear it even if the store has ended. If no connection can be
made (a firewall, for example), the store and the time-outs remain.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

from hipress import compat
from hipress.compat import Store
from hipress.ranks.door import WORD, Door

_TRIES = 3  # connections that end unanswered; then another process has the port


@dataclass(frozen=True)
class Liveness:
    """The address at which a process may be watched, as posted in the store."""

    host: str | None  # None: the process is on the store's machine
    port: int
    machine: str  # host name
    token: str


def announce(store: Store) -> Liveness | None:
    """The presence of this process, for others to watch; None for stores without an address."""
    host = compat.store_host(store)
    if host is None:
        return None
    try:
        own = _address_towards(host)
        door = _PROCESS.door(own)
    except OSError:  # no such route, or no more sockets: it cannot be watched
        return None
    return Liveness(None if _loops(own) else own, door.port, socket.gethostname(), door.token)


def tell(key: str, facts: Any) -> None:
    """Send a note to all processes that watch this one."""
    _PROCESS.tell(key, facts)


def heard(presence: Liveness, store: Store) -> dict[str, Any]:
    """Notes that a process has sent so far, by key."""
    return _PROCESS.look(presence, store).notes


def has_ended(presence: Liveness, store: Store) -> bool:
    """True if a process is known to have ended; the first call only connects to it."""
    return _PROCESS.look(presence, store).ended


class _Watched:
    """A connection to another process."""

    def __init__(self, presence: Liveness, host: str) -> None:
        self._presence, self._address = presence, (host, presence.port)
        self.ended = False
        self.notes: dict[str, Any] = {}
        self._socket: socket.socket | None = None
        self._said = self._answered = False
        self._data = b""
        self._tries = 0

    def look(self) -> None:
        """Read all that has arrived; never waits."""
        try:
            while not self.ended:
                self._take()
        except BlockingIOError:
            pass
        except ConnectionRefusedError:  # between machines a firewall may refuse it
            same = self._presence.machine == socket.gethostname()
            self.ended = same or self._tries > 0
            self.close()
        except (ConnectionResetError, BrokenPipeError):
            self._tries += 1
            self.ended = self._answered or self._tries == _TRIES
            self.close()
        except OSError:
            self.close()

    def close(self) -> None:
        """Disconnect, so that the next `look` connects again."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._said, self._data = None, False, b""

    def _take(self) -> None:
        if self._socket is None:
            self._socket = _connecting(self._address)
        if not self._said:
            self._socket.send(self._presence.token[:WORD].encode())
            self._said = True
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        self._data += data
        if not self._answered:
            self._hear_answer()
        *lines, self._data = self._data.split(b"\n") if self._answered else (self._data,)
        for line in lines:
            key, facts = json.loads(line)
            self.notes[key] = facts

    def _hear_answer(self) -> None:
        answer, self._data = self._data[:WORD], self._data[WORD:]
        if answer != self._presence.token[WORD:].encode():
            raise ConnectionResetError  # another process has the port now
        self._answered = True


class _Process:
    """This process: its door, and the connections by which it watches others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._door: Door | None = None
        self._watched: dict[Liveness, _Watched] = {}

    def door(self, own: str) -> Door:
        """The port of this process, made at the first call; `own`: this machine's address."""
        with self._lock:
            if self._door is None:
                self._door = Door(_open_to(own))
            return self._door

    def tell(self, key: str, facts: Any) -> None:
        if self._door is not None:
            self._door.tell(key, facts)

    def look(self, presence: Liveness, store: Store) -> _Watched:
        """The connection to another process, with all that has arrived by now."""
        with self._lock:
            if presence not in self._watched:
                host = presence.host or compat.store_host(store) or "localhost"
                self._watched[presence] = _Watched(presence, host)
            self._watched[presence].look()
            return self._watched[presence]

    def forget(self) -> None:
        """Close all connections in a forked child: it would keep its parent's open."""
        for each in self._watched.values():
            each.close()
        if self._door is not None:
            self._door.forget()
        self.__init__()  # type: ignore[misc] # a lock may be another thread's


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _open_to(own: str) -> str:
    """The address at which to listen, "" for all, if this process reaches the store from `own`.

    If `own` is a loopback address and there are other machines, these connect from elsewhere, to
    the store's address.
    """
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "" if _loops(own) and not alone else own


def _address_towards(host: str) -> str:
    """This machine's address on the way to a host. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own


@functools.cache
def _resolved(host: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]


def _connecting(place: tuple[str, int]) -> socket.socket:
    family, kind, protocol, _, address = _resolved(*place)
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    connection.connect_ex(address)  # the next use of the socket raises an error
    return connection


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.forget)
