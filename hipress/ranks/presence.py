"""Which ranks' processes have ended, and what they have told.

[Note: presence] A process that is killed tells nobody, and the job's store does not notice, or ends
with it. So each process has a door (door.py), and posts where as it comes to a meeting. The others
connect to it. The end of the connection as a process ends, however it does, is the kernel's work: a
process that is busy, or stopped, has not ended. On that connection a process tells the others why
it cannot go on, too: they hear it where the store has ended. Where no connection can be made (a
firewall, say) nothing is known of a rank, and the store and the time-outs remain.
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

_TRIES = 3  # connections that end before they are answered; then somebody else has the port


@dataclass(frozen=True)
class Presence:
    """Where a process may be watched, as it says in the store."""

    host: str | None  # its address; None: that of the store, on whose machine it is
    port: int
    machine: str  # its name
    token: str


def announce(store: Store) -> Presence | None:
    """This process, for others to watch; None for stores without an address."""
    host = compat.store_host(store)
    if host is None:
        return None
    try:
        own = _address_towards(host)
        door = _PROCESS.door(own)
    except OSError:  # no such route, or no more sockets: it cannot be watched
        return None
    return Presence(None if _loops(own) else own, door.port, socket.gethostname(), door.token)


def tell(key: str, facts: Any) -> None:
    """Tell this to all processes that watch this one."""
    _PROCESS.tell(key, facts)


def heard(presence: Presence, store: Store) -> dict[str, Any]:
    """What a process has told so far, by key."""
    return _PROCESS.look(presence, store).notes


def has_ended(presence: Presence, store: Store) -> bool:
    """Whether a process is known to have ended; the first call only connects to it."""
    return _PROCESS.look(presence, store).ended


class _Watched:
    """A connection to another process."""

    def __init__(self, presence: Presence, host: str) -> None:
        self._presence, self._address = presence, (host, presence.port)
        self.ended = False
        self.notes: dict[str, Any] = {}
        self._socket: socket.socket | None = None
        self._said = self._answered = False
        self._data = b""
        self._tries = 0

    def look(self) -> None:
        """Take what has come. Waits for nothing."""
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
        """Disconnect, for another try."""
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
            raise ConnectionResetError  # of another process, which has the port now
        self._answered = True


class _Process:
    """This process: its door, and the connections by which it watches others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._door: Door | None = None
        self._watched: dict[Presence, _Watched] = {}

    def door(self, own: str) -> Door:
        """Where this process may be watched; `own`: its address, when the door is made."""
        with self._lock:
            if self._door is None:
                self._door = Door(_open_to(own))
            return self._door

    def tell(self, key: str, facts: Any) -> None:
        if self._door is not None:
            self._door.tell(key, facts)

    def look(self, presence: Presence, store: Store) -> _Watched:
        """What is known of another process by now."""
        with self._lock:
            if presence not in self._watched:
                host = presence.host or compat.store_host(store) or "localhost"
                self._watched[presence] = _Watched(presence, host)
            self._watched[presence].look()
            return self._watched[presence]

    def forget(self) -> None:
        """In a forked child, which would keep its parent's connections open."""
        for each in self._watched.values():
            each.close()
        if self._door is not None:
            self._door.forget()
        self.__init__()  # type: ignore[misc] # a lock may be another thread's


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _open_to(own: str) -> str:
    """The address at which to listen, "" for all, where this process reaches the store from `own`.
    If that is the loopback and there are other machines, these come from elsewhere, to the store's
    address."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "" if _loops(own) and not alone else own


def _address_towards(host: str) -> str:
    """This machine's address on the way to a host. Nothing is sent."""
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
    connection.connect_ex(address)  # an error shows in what is done with it next
    return connection


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.forget)
