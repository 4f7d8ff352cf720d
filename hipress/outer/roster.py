"""Sites by name, as they join, leave and die."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from hipress.errors import ConfigError
from hipress.outer.meeting import Note
from hipress.ranks.coordinator import Coordinator

log = logging.getLogger("hipress")
SHOWN = 8  # sites by name in a line of the log


class Roster:
    """The sites of the last meeting. Numbers of sites may change from one to the next, and several
    may have one name, so each has a token, too."""

    def __init__(self, name: Any) -> None:
        """name: of this site; by default that of its host. Raises ConfigError."""
        if name is not None and not (isinstance(name, str) and name.isprintable() and name):
            raise ConfigError(f"name of a site is a text of one line, not {name!r}")
        self.name, self.token = name or socket.gethostname(), secrets.token_hex(8)  # this site's
        self._known: dict[str, str] = {}  # texts by token, by rank
        self._leaving: set[str] = set()  # tokens
        self._left: set[str] = set()
        self._sites: Coordinator | None = None

    @property
    def names(self) -> list[str]:
        """Texts such as "site 3 (amsterdam)", without sites that have left."""
        return [text for token, text in self._known.items() if token not in self._left]

    def meet(self, coordinator: Coordinator, notes: Sequence[Note]) -> None:
        """Take over who is there, and log who has come, and who is there no more. notes: of the
        sites, by rank."""
        here = {
            note.token: f"site {number} ({note.name})"
            for number, note in zip(coordinator.ranks, notes, strict=True)
        }
        gone = self._known.keys() - here.keys() - self._left
        ended = [] if self._sites is None else self._sites.mailbox.ended()
        died = {token for rank, token in enumerate(self._known) if rank in ended}
        self._tell("ended", [self._known[token] for token in gone & died])
        self._tell("did not come", [self._known[token] for token in gone - died])
        self._tell("joined", [text for token, text in here.items() if token not in self._known])
        self._known, self._sites, self._left = here, coordinator, set()
        self._leaving = {note.token for note in notes if note.leaving}

    def part(self) -> None:
        """Log who has left, after a round that went well."""
        self._left |= self._leaving
        self._tell("left", [self._known[token] for token in self._leaving])

    def _tell(self, what: str, texts: Sequence[str]) -> None:
        if texts:
            more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
            log.info("hipress: %s%s %s", ", ".join(sorted(texts)[:SHOWN]), more, what)
