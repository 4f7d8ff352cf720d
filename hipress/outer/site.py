"""A site of an outer loop: its steps, and the rounds in which it takes part."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from hipress.errors import ConfigMismatch, HipressError, StateError, SyncError
from hipress.model import shards
from hipress.options import Options
from hipress.outer.fragments import Fragment
from hipress.outer.meeting import (
    NEW,
    Note,
    Refused,
    Roster,
    catch_up,
    compare_notes,
    hand_over,
)
from hipress.outer.members import Members
from hipress.outer.rounds import Round
from hipress.outer.schedule import Schedule
from hipress.outer.site_model import SiteModel, refuse_averaged
from hipress.outer.sites import Sites
from hipress.ranks.coordinator import Coordinator

log = logging.getLogger("hipress")
TRIES = 20  # rounds in a row that may be undone


class Site:
    """This rank's part of an outer loop. After an error it must be closed."""

    def __init__(
        self,
        model: SiteModel,
        members: Members,
        options: Options,
        schedule: Schedule,
        roster: Roster,
    ) -> None:
        self.model, self.members, self.schedule, self.roster = model, members, schedule, roster
        self.fragments, self._options = model.fragments, options
        self.rounds = NEW  # that all sites have ended
        self.steps = 0  # since the begin of the last round
        self.round: Round | None = None  # under way
        self.undone = 0  # rounds that were
        self.has_left = False  # it has ended its last round
        self.refusal: ConfigMismatch | None = None  # other sites go on without this one
        self.sent_bytes = 0  # by connections that have ended
        self._sites: Sites | None = None
        self._notes: list[Note] = []  # of the sites, by rank
        #: rounds undone since the last that was committed, but for those of a refused site
        self._undone_in_a_row = 0
        self._not_given = 0  # rounds in a row in which it failed to hand over

    def step(self) -> None:
        """Count a step, and begin or end a round that is due."""
        self.steps += 1
        if self.round is not None and self.steps == self.schedule.delay:
            self.end()
        if self.steps == self.schedule.spacing:
            self.steps = 0
            self.begin()

    def leave(self) -> None:
        """Take part in rounds until this site has left."""
        if self.round is not None:
            self.end()
        self.steps = 0
        while not self.has_left:
            self.begin(leaving=True)
            if self.round is not None:
                self.end()

    def begin(self, leaving: bool = False) -> None:
        """Meet the other sites, and send a fragment's pseudo-gradient."""
        module = self.model.module
        shards.reshard(module)
        self.model.snapshot.refuse_changes(module)
        refuse_averaged(self.model)
        for each in self.fragments if self.rounds != NEW else ():
            each.refuse_infinite()
        coordinator = self.members.meet(leaving=leaving)
        if self._sites is None or coordinator is not self._sites.coordinator:
            try:
                self._connect(coordinator, leaving)
            except HipressError as error:
                if error is self.refusal:
                    raise
                self._undo(error)
                return
        assert self._sites is not None
        counted = [rank for rank, note in enumerate(self._notes) if note.rounds != NEW]
        self._notes = [replace(note, rounds=self.rounds) for note in self._notes]
        if not counted:  # the first meeting of all: they have nothing to average
            self.members.commit(None)
            return
        fragment = self.fragments[self.rounds % len(self.fragments)]
        self.round = Round.of(self.rounds, fragment, self._sites, self.schedule, counted)
        self.round.start()
        if not self.schedule.delay:
            self.end()

    def end(self) -> None:
        """Wait for the average, and take it over, if all sites have it; else undo the round."""
        assert self.round is not None
        shards.reshard(self.model.module)
        round_, self.round = self.round, None
        try:
            round_.wait()
            given = self._hand_over(round_)
        except HipressError as error:
            self._undo(error, round_)
            return
        if not self.members.commit(None):
            self._undo(None, round_)
            return
        round_.commit(seed=self.rounds)
        self.roster.part()
        self._take(given, here=round_.sites.coordinator.mailbox.here)
        self.rounds += 1
        self._undone_in_a_row = 0
        self.has_left = self._notes[round_.sites.coordinator.rank].leaving

    def _undo(self, error: HipressError | None, round_: Round | None = None) -> None:
        """Go back to the begin of a round. Raises the error if sites do not change, and SyncError
        after TRIES in a row, but for rounds in which a site was refused: a scheduler may start it
        again and again."""
        if error is not None:
            self.close_sites()
            self.members.commit(error)
        if round_ is not None:
            round_.undo()
        self.undone += 1
        if not isinstance(error, Refused):
            self._undone_in_a_row += 1
        why = error or "another site could not end it"
        log.warning(
            "hipress: round %d of the outer loop is undone, the next has what it had: %s",
            self.rounds, why,
        )  # fmt: skip
        if self._undone_in_a_row == TRIES:
            raise SyncError(f"{TRIES} rounds in a row were undone, the last because: {why}")

    def _connect(self, coordinator: Coordinator, leaving: bool) -> None:
        """Connect with these sites, and give the agreed weights to those that lack them."""
        self.part()
        roster, changes = self.roster, self.members.changes
        own = Note(roster.name, roster.token, self.rounds, leaving, self._not_given)
        notes, self.refusal = compare_notes(coordinator, own, self.model.facts, changes=changes)
        if self.refusal is not None:
            raise self.refusal
        rounds = [note.rounds for note in notes]
        catch_up(coordinator, rounds, self.model)
        self.rounds = max(0, *rounds)
        bundles = [bundle for fragment in self.fragments for bundle in fragment.bundles]
        self._sites = Sites(
            coordinator, self.model.plan, self._options, bundles, calls=self.calls_so_far,
            changes=changes,
        )  # fmt: skip
        self._notes = notes
        roster.meet(coordinator, notes)

    def _hand_over(self, round_: Round) -> dict[int, list[torch.Tensor] | None]:
        """Give what leaving sites have not delivered to the first that stays: see `hand_over`."""

        def left() -> list[torch.Tensor]:
            return [self.left(each, sent=each is round_.fragment) for each in self.fragments]

        try:
            given = hand_over(round_.sites.coordinator, self._notes, left)
        except HipressError:
            self._not_given += 1
            raise
        self._not_given = 0
        return given

    def _take(self, given: Mapping[int, list[torch.Tensor] | None], here: int) -> None:
        """Keep what sites have left to this one, as `hand_over` returned it. here: its number."""
        ends = all(note.leaving for note in self._notes)
        tell = log.info if ends else log.warning  # a training that ends may lose it
        for site, left in given.items():
            if left is None:
                who = "this site" if site == here else f"site {site}"
                tell("hipress: what %s had not delivered as it left is lost", who)
                continue
            for fragment, values in zip(self.fragments, left, strict=True):
                fragment.keep_undelivered(values)

    def part(self) -> None:
        """End the connections; what codecs held back goes to the next sites."""
        if self._sites is None:
            return
        self._sites.close()
        for fragment in self.fragments:
            for bundle in fragment.bundles:
                left = self._sites.undelivered(bundle)
                if left is not None and left.any():
                    fragment.keep_undelivered(left, bundle.part)
        self.sent_bytes += round(self._sites.counters.wire_bytes)
        self._sites = None

    def close_sites(self) -> None:
        """End the connections after an error: what codecs held back stays with them."""
        if self._sites is not None:
            self._sites.close()

    def left(self, fragment: Fragment, *, sent: bool = False) -> torch.Tensor:
        """Pseudo-gradient of this site that has not been delivered, with that of its steps since
        the last round. sent: but for what a round of the fragment, under way, delivers."""
        sites = self._sites
        flat = torch.zeros(fragment.elements, device="cpu") if sent else fragment.change()
        if fragment.undelivered is not None and not sent:
            flat += fragment.undelivered
        for bundle in fragment.bundles:
            left = None if sites is None else sites.undelivered(bundle)
            if left is not None:
                flat[bundle.part] += left
        return flat

    def connected(self) -> Sites:
        """The sites of the last round. Raises StateError if there are none."""
        if self._sites is None:
            raise StateError(
                "no site is connected with this one: the outer loop has ended, or the last round "
                "was undone; save and load after the next one"
            )
        return self._sites

    @property
    def calls_so_far(self) -> int:
        """Number of the next exchange of sites that meet now; the same at all of them."""
        return self.rounds * sum(len(fragment.bundles) for fragment in self.fragments)

    @property
    def total_bytes(self) -> int:
        """Bytes sent so far."""
        now = 0 if self._sites is None else round(self._sites.counters.wire_bytes)
        return self.sent_bytes + now

    def memory(self) -> dict[str, int]:
        """Bytes beside weights and optimizer, by use."""
        memory: Counter[str] = Counter()
        for fragment in self.fragments:
            memory.update(fragment.bytes_by_use())
        if self._sites is not None:
            memory["states"] = self._sites.states.nbytes
        memory["round"] = 0 if self.round is None else self.round.held_bytes
        return dict(memory)
