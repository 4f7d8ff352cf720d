"""The port at which other ranks watch this process in an epoch, and are told why it ends.

[Note: the door] Any host on the network may connect to a port. So a visitor must at once send a
token from the job's store; otherwise it is dropped, the oldest first if many wait. The socket
listens at the address by which this machine reaches the store, and a thread accepts connections, so
that no queue fills up.
"""

from __future__ import annotations

import atexit
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["FINISHED", "LEFT", "WORD", "Door"]

WORD = 16  # bytes of the visitor's token, and of the answer
PATIENCE = 5.0  # seconds in which a visitor must send it
STRANGERS = 64  # largest number of visitors that have not sent it yet
KEPT = 64  # notes kept for later visitors
ROOM = 4096  # bytes of the receive buffer of a visitor
UNREAD = 1 << 20  # bytes that wait for a visitor that does not read; it gets no more notes then
FINISHED = "finished"  # key of a note: how many waits of each group were not in vain
LEFT = "left"  # key of the last note of a process that ends in order


class Door:
    """A listening socket, open until `close` or until the process ends."""

    def __init__(self, host: str, finished: Mapping[str, int]) -> None:
        """host: an address of this machine; "" for all. finished: for `tell_finished`. Raises
        OSError if it cannot listen."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        self._listener.setblocking(False)
        self._finished = finished
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(WORD)  # the visitor's token, then the answer
        self._open = True
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # connected since, by time.monotonic()
        self._guests: dict[socket.socket, bytearray] = {}  # with what could not be sent yet
        self._notes: deque[bytes] = deque(maxlen=KEPT)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="hipress-door", daemon=True).start()
        atexit.register(self.close)

    def tell(self, key: str, facts: Any) -> None:
        """Send a note to all visitors, now and later."""
        note = json.dumps([key, facts], default=str).encode() + b"\n"
        with self._lock:
            self._notes.append(note)
            for guest, unsent in self._guests.items():
                if len(unsent) < UNREAD:
                    unsent += note
                    self._send(guest)

    def tell_finished(self) -> None:
        """Tell what this rank has finished: [Note: leaving] in epoch.py."""
        self.tell(FINISHED, dict(self._finished))

    def forget(self) -> None:
        """Close all sockets in a forked child: it would keep its parent's connections open."""
        self._open = False
        for each in (self._listener, *self._strangers, *self._guests):
            each.close()
        self._selector.close()

    def close(self) -> None:
        """Tell visitors that this rank leaves the epoch, and disconnect them: waiting ranks learn
        it at once. As the interpreter begins to end, at the latest."""
        atexit.unregister(self.close)
        if not self._open:
            return
        self.tell_finished()
        self.tell(LEFT, None)
        self._open = False
        with self._lock:
            for each in (self._listener, *self._guests, *self._strangers):
                with suppress(OSError):  # one that has ended
                    each.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while self._open:
            for key, events in self._selector.select(PATIENCE):
                visitor = key.fileobj
                assert isinstance(visitor, socket.socket)
                if visitor is self._listener:
                    self._accept()
                    continue
                if events & selectors.EVENT_WRITE:
                    with self._lock:
                        self._send(visitor)
                if events & selectors.EVENT_READ:
                    self._hear(visitor)
            self._drop_late()
        self._drop(*self._strangers, *self._guests)
        self._listener.close()
        self._selector.close()

    def _send(self, guest: socket.socket) -> None:
        """Send what waits, as far as the guest takes it: a note is never cut for good."""
        unsent = self._guests.get(guest)
        if unsent is None:  # dropped since `select` returned
            return
        try:
            del unsent[: guest.send(unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended
            unsent.clear()
        writes = selectors.EVENT_WRITE if unsent else 0
        self._selector.modify(guest, selectors.EVENT_READ | writes)

    def _accept(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no more files, say
            self._drop(*self._strangers)
            time.sleep(0.1)
            return
        visitor.setblocking(False)
        self._strangers[visitor] = time.monotonic()
        self._selector.register(visitor, selectors.EVENT_READ)
        if len(self._strangers) > STRANGERS:
            oldest = next(iter(self._strangers))
            self._hear(oldest)  # it may have said the word meanwhile
            if oldest in self._strangers:
                self._drop(oldest)

    def _hear(self, visitor: socket.socket) -> None:
        """Read a stranger's token; a guest sends nothing more."""
        if visitor.fileno() < 0:  # dropped since `select` returned
            return
        try:
            said = visitor.recv(WORD)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        word, answer = self.token[:WORD].encode(), self.token[WORD:].encode()
        if visitor not in self._strangers or not hmac.compare_digest(said, word):
            self._drop(visitor)
            return
        del self._strangers[visitor]
        with self._lock:
            self._guests[visitor] = bytearray(b"".join([answer, *self._notes]))
            self._send(visitor)

    def _drop_late(self) -> None:
        late = time.monotonic() - PATIENCE
        self._drop(*[each for each, since in self._strangers.items() if since < late])

    def _drop(self, *visitors: socket.socket) -> None:
        with self._lock:
            for each in visitors:
                self._strangers.pop(each, None)
                self._guests.pop(each, None)
                self._selector.unregister(each)
                each.close()
