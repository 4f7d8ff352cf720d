"""Connections to other ranks' processes: see [Note: presence] in epoch.py."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from hipress.ranks.door import FINISHED, LEFT, WORD

_TRIES = 3  # connections that end unanswered; then another process has the port


@dataclass(frozen=True)
class Liveness:
    """The address at which a process may be watched, as posted in the store."""

    host: str | None  # None: the process is on the store's machine
    port: int
    machine: str  # host name
    token: str


class Watched:
    """A connection to another process."""

    def __init__(self, rank: int, presence: Liveness, host: str) -> None:
        self.rank, self._presence, self._address = rank, presence, (host, presence.port)
        self.ended = False
        self.notes: dict[str, Any] = {}
        self._socket: socket.socket | None = None
        self._said = self._answered = False  # on this connection
        self._known = False  # it has answered, on this connection or an earlier one
        self._data = b""
        self._tries = 0

    @property
    def reached(self) -> bool:
        """True once the process has answered, or is known to have ended."""
        return self._known or self.ended

    @property
    def left(self) -> bool:
        """True if the process ended in order, and said so."""
        return LEFT in self.notes

    @property
    def finished(self) -> dict[str, int]:
        """Numbers of waits that the process had finished, by group, as it left or detached."""
        finished: dict[str, int] = self.notes.get(FINISHED, {})
        return finished

    def look(self) -> None:
        """Read all that has arrived; never waits."""
        try:
            while not self.ended:
                self._read()
        except BlockingIOError:
            pass
        except ConnectionRefusedError:  # between machines a firewall may refuse it
            same = self._presence.machine == socket.gethostname()
            self.ended = same or self._known or self._tries > 0
            self.close()
        except (ConnectionResetError, BrokenPipeError):
            self._tries += 1
            self.ended = self._answered or self._tries == _TRIES
            self.close()
        except OSError:  # the link was down, perhaps: connect again
            self.close()

    def close(self) -> None:
        """Disconnect, so that the next `look` connects again."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._data = None, b""
        self._said = self._answered = False

    def _read(self) -> None:
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
        if len(self._data) < WORD:
            return
        answer, self._data = self._data[:WORD], self._data[WORD:]
        if answer != self._presence.token[WORD:].encode():
            raise ConnectionResetError  # another process has the port now
        self._answered = self._known = True


def loops(address: str) -> bool:
    """True for a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def open_to(own: str) -> str:
    """The address at which to listen, "" for all, if this process reaches the store from `own`.

    If `own` is a loopback address and there may be other machines, these connect from elsewhere, to
    the store's address.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE")
    alone = local is not None and local == os.environ.get("WORLD_SIZE")
    return "" if loops(own) and not alone else own


def address_towards(host: str) -> str:
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
