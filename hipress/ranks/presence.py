"""Which ranks' processes have ended.

[Note: presence] A process that is killed tells nobody, and the job's store does not notice. So each
process opens a port, at which it never accepts anything, and posts it as it comes to a meeting. The
others connect to it. That, and the end of the connection as its process ends, however it does, is
the kernel's work: a process that is busy, or stopped, has not ended. Where no connection can be
made (a firewall, say) nothing is known of a rank, and the time-outs remain.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

from hipress import compat
from hipress.compat import Store

_BACKLOG = 4096  # connections that wait to be accepted, for ever: one of each other process

Place = tuple[str, int]


@dataclass(frozen=True)
class Presence:
    """Where a process listens, as it says in the store."""

    host: str | None  # its address; None: that of the store, on whose machine it is
    port: int
    machine: str  # its name


def announce(store: Store) -> Presence | None:
    """This process, for others to watch; None for stores without an address."""
    host = compat.store_host(store)
    if host is None:
        return None
    try:
        own, port = _address_towards(host), _PROCESS.listen()
    except OSError:  # no such route, or no more sockets: it cannot be watched
        return None
    loopback = ipaddress.ip_address(own.partition("%")[0]).is_loopback
    return Presence(None if loopback else own, port, socket.gethostname())


def has_ended(presence: Presence, store: Store) -> bool:
    """Whether a process is known to have ended; the first call only connects to it."""
    host = presence.host or compat.store_host(store)
    return host is not None and _PROCESS.lost((host, presence.port), presence.machine)


class _Process:
    """The sockets of this process: the one at which it listens, and those by which it watches."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._watched: dict[Place, socket.socket] = {}

    def listen(self) -> int:
        """The port at which this process listens."""
        if self._listener is None:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(
                ("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both
            )
        port: int = self._listener.getsockname()[1]
        return port

    def lost(self, place: Place, machine: str) -> bool:
        """Whether a connection ended, or is refused on this very machine."""
        try:
            if place not in self._watched:
                self._watched[place] = _connecting(place)
            return not self._watched[place].recv(1)
        except BlockingIOError:
            return False
        except ConnectionRefusedError:
            self._watched.pop(place, None)
            return machine == socket.gethostname()  # between machines a firewall may refuse it
        except ConnectionResetError:
            return True
        except OSError:
            return False

    def forget(self) -> None:
        """In a forked child, which would keep its parent's port open."""
        for each in (self._listener, *self._watched.values()):
            if each is not None:
                each.close()
        self._listener = None
        self._watched.clear()


def _address_towards(host: str) -> str:
    """This machine's address on the way to a host. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own


def _connecting(place: Place) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    with suppress(BlockingIOError):
        connection.connect(address)
    return connection


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.forget)
