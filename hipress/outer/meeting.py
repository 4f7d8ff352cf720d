"""Meetings: sites compare models as they come together, catch up, and hand over as they leave."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hipress.errors import ConfigError, ConfigMismatch, SyncError
from hipress.outer.site_model import SiteModel
from hipress.ranks.coordinator import Coordinator, compare
from hipress.ranks.groups import connect, share

log = logging.getLogger("hipress")
SHOWN = 8  # sites by name in a line of the log
NEW = -1  # rounds of a site that has no agreed weights yet
GIVE_TRIES = 3  # rounds in a row in which a leaving site may fail to hand over
GIVING = "what a site leaves"


class Refused(SyncError):
    """Another site has a different model or options."""


@dataclass(frozen=True)
class Note:
    """A site's facts for the others, as they meet."""

    name: str
    token: str  # several may have one name
    rounds: int  # that it has ended; NEW for none
    leaving: bool  # it takes part for the last time
    not_given: int  # rounds in a row in which it failed to hand over


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


def compare_notes(
    coordinator: Coordinator, own: Note, facts: Mapping[str, Any], *, changes: bool
) -> tuple[list[Note], ConfigMismatch | None]:
    """Notes of all sites, by rank, and the reason why this one may not take part: another model or
    other options than at the one that has ended most rounds. facts: of these, equal at all sites.

    Raises Refused if another site may not, and ConfigMismatch if sites do not change and differ.
    """
    if not changes:
        posted = coordinator.require_equal(facts, asdict(own))
        return [Note(**each) for each in posted], None
    posted = coordinator.require_equal({}, {"note": asdict(own), "facts": facts})
    notes, names = [Note(**each["note"]) for each in posted], coordinator.ranks
    first = max(range(len(notes)), key=lambda rank: (notes[rank].rounds, -rank))
    for rank in (coordinator.rank, *range(len(notes))):
        pair = posted[first]["facts"], posted[rank]["facts"]
        try:
            compare(pair, [names[first], names[rank]])
        except ConfigMismatch as error:
            if rank == coordinator.rank:
                return notes, error
            raise Refused(f"site {names[rank]} is refused: {error}") from error
    return notes, None


def catch_up(coordinator: Coordinator, rounds: Sequence[int], model: SiteModel) -> None:
    """Take agreed weights and momentum from the first site that has ended most rounds. rounds: that
    each site has ended, by rank; sites that have none yet take them, too."""
    most = max(rounds)
    source = rounds.index(most)
    behind = [rank for rank, count in enumerate(rounds) if count < most or most == NEW]
    behind = [rank for rank in behind if rank != source]
    if not behind or coordinator.rank not in (source, *behind):
        return
    some, here = coordinator.of([source, *behind]), model.shared
    # the source may end while it sends
    sent = here if coordinator.rank == source else [each.clone() for each in here]
    share(sent, connect(some, "agreed weights"), some)
    if coordinator.rank != source:
        adopt(model, sent, keep_steps=rounds[coordinator.rank] != NEW)


def adopt(model: SiteModel, sent: Sequence[torch.Tensor], *, keep_steps: bool) -> None:
    """Take over what another site has sent. keep_steps: this one's own steps since its last round
    count in the next."""
    before = [fragment.target() for fragment in model.fragments]
    for own, other in zip(model.shared, sent, strict=True):
        own.copy_(other)
    for fragment, old in zip(model.fragments, before, strict=True):
        goal = fragment.target()
        if keep_steps:
            goal.add_(fragment.weights()).sub_(old)
        fragment.write(goal)


def hand_over(
    coordinator: Coordinator, notes: Sequence[Note], left: Callable[[], list[torch.Tensor]]
) -> dict[int, list[torch.Tensor] | None]:
    """Give what leaving sites will not have delivered to the first that stays.

    Returns it, at these sites, by site and fragment; None for what is lost: all sites leave, or
    GIVE_TRIES rounds failed here.

    left: what this site will not have delivered, by fragment. It counts if the round is committed:
    so it is neither lost nor given twice, whatever happens to one of the two.
    """
    given: dict[int, list[torch.Tensor] | None] = {}
    stay = [rank for rank, note in enumerate(notes) if not note.leaving]
    for leaver in (rank for rank, note in enumerate(notes) if note.leaving):
        pair = [leaver, *stay[:1]]
        if coordinator.rank not in pair:
            continue
        site = coordinator.ranks[leaver]
        if not stay or max(notes[rank].not_given for rank in pair) >= GIVE_TRIES:
            given[site] = None
            continue
        values, both = left(), coordinator.of(pair)
        share(values, connect(both, GIVING), both)
        both.wait_for_all(GIVING)  # the first may end then
        if coordinator.rank != leaver:
            given[site] = values
    return given
