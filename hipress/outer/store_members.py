"""Sites that come and go, by a key-value store."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from hipress import compat
from hipress.arguments import group_of
from hipress.compat import PrefixStore, Store
from hipress.errors import (
    AgreementTimeout,
    ConfigError,
    ConfigMismatch,
    HipressError,
    SyncError,
)
from hipress.outer.members import seconds
from hipress.ranks import coordinator as coordinators
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.epoch import epoch_of
from hipress.ranks.mailbox import backoff, unless_silent
from hipress.ranks.store import add_line, call_store, read_lines, read_notes

log = logging.getLogger("hipress")

T = TypeVar("T")
Call = Callable[[Callable[[Store], Any]], Any]  # makes a call to a store


class StoreMembers:
    """Sites that meet in a store, which outlives them: they may join, leave and die at any time.

    ::

        store = dist.TCPStore(host, 29600, is_master=False, wait_for_workers=False)
        outer = hipress.Outer(model, optimizer, members=hipress.StoreMembers(store, expected=2))

    [Note: rounds in a store] Rounds are numbered, and the store keeps the last one, with its sites.
    A site that comes to the next one says so, and waits for the sites of the last, but for those
    whose processes have ended and those that left. Then it proposes all that have come as the sites
    of the next round, in place of the last. The store takes the first proposal, and none in place
    of a round that is no longer the last, so all sites have the same, and one that was away goes on
    from there. A newcomer comes to the next round and waits until it is proposed. As long as it has
    ended no round, and others have, it does not go on without them, however late they are: it would
    begin anew. Nor does a site that was away, until it has ended a round again: the others may have
    agreed on other weights meanwhile. In the same way a round is committed: by the first that sees
    that all sites have the average, unless another has proposed before to undo it, since it waited
    in vain. Who has come, has the average, or has left adds a line to a list, which a site reads by
    one request: its requests in a round do not grow with the number of sites. What a round leaves
    in the store is deleted when all its sites have come to the next: one of them that is late may
    still have to read it. Any other site that then reads its list finds it empty, and a later
    round.
    """

    changes = True

    def __init__(
        self,
        store: Store,
        *,
        expected: int = 1,
        patience: float | timedelta = 60.0,
        timeout: float | timedelta = 1800.0,
        site: dist.ProcessGroup | None = None,
    ) -> None:
        """Come to the store; all sites use the same one, and no other training.

        Args:
            expected: sites for which the first round waits, as long as `patience`.
            patience: seconds to wait for a site that was in the round before. A slower one is left
                out, and counts again in the next round, with all its steps.
            timeout: seconds that a newcomer waits for a round of others.
            site: the ranks of this site, if there are several: each has a shard of the model, or
                all of it. All of them make this, and one Outer each.

        Raises ConfigError, and the errors of a store that does not answer.
        """
        if not compat.has_requests_of_several_keys(store):
            raise ConfigError(f"StoreMembers needs a TCPStore, which has lists, not {store!r}")
        if type(expected) is not int or expected < 1:
            raise ConfigError(f"expected is a whole number of sites from 1 on, not {expected!r}")
        self.expected = expected
        self.patience, self.timeout = seconds("patience", patience), seconds("timeout", timeout)
        #: of this site's ranks, if there are several
        self._site: Coordinator | None = None
        if site is not None:
            longest = self.timeout + self.patience  # seconds in which the first rank meets others
            self._site = coordinators.coordinator(group_of(site, "site"), longest)
        self._shard = 0 if self._site is None else self._site.rank
        self._given = store  # which may be the host
        own = compat.another_client(store)
        self._store: Store = PrefixStore("hipress/outer", own)
        #: for each rank of a site, since it meets with its like
        self._shards: Store = PrefixStore(f"shard {self._shard}", self._store)
        self._round = -1  # number of the last meeting
        self._sites: list[int] = []  # of it, in the order of coming
        self._last = ""  # the last round of all that this site knows of, as in the store
        self._coordinator: Coordinator | None = None
        self._committed = False
        self._current = False  # this site has ended a round well, and has not been away since
        self.id = 0  # until the store has given one
        self.id = self._by_leader(self._come)

    def meet(self, *, leaving: bool) -> Coordinator:
        """Implements Members.meet. See [Note: rounds in a store]."""
        before, sites_before = self._round, self._sites
        self._round, self._sites, gone = self._by_leader(lambda: self._meet(leaving))
        was_there = self._round == before + 1  # else others have made connections since
        self._current = self._current and was_there
        kept = was_there and self._committed and self._sites == sites_before and not gone
        if self._coordinator is None or not kept:
            rank = self._sites.index(self.id)
            name = f"round {self._round}"
            self._coordinator = Coordinator.on(self._shards, rank, self._sites, name, self.patience)
        return self._coordinator

    def commit(self, error: HipressError | None) -> bool:
        """Implements Members.commit."""
        well = self._all_well(error is None)
        self._committed = self._by_leader(lambda: self._decide(well))
        self._current = self._current or self._committed
        return self._committed

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of this site."""
        if self._site is not None:
            self._site.fail(error)

    def close(self) -> None:
        """Let the others not wait for this site."""
        if self._shard == 0:
            with unless_silent():
                self._call(lambda store: add_line(store, "left", self.id))

    def _come(self) -> int:
        """A number for this site; larger than those of all that came before."""
        number = self._call(lambda store: store.add("sites", 1))
        self._epoch = epoch_of(self._shards, number)
        self._epoch.join(self._shards, time.monotonic() + self.patience)
        self._last = self._call(_last_round)
        return number

    def _meet(self, leaving: bool) -> tuple[int, list[int], list[int]]:
        """Number, sites and leaving sites of the next round that has this site."""
        end = time.monotonic() + self.timeout
        while True:
            before, sites_before, _ = _parsed(self._last)
            self._last = self._choice(leaving, end)
            number, sites, leavers = _parsed(self._last)
            if self.id in sites:
                all_came = number == before + 1 and {*sites_before} <= {*sites}
                if all_came and self.id == sites[0]:
                    self._forget(before)
                return number, sites, leavers

    def _forget(self, number: int) -> None:
        """Delete what a round has left in the store."""
        keys = f"round {number}", *decision_keys(f"end of {number}")
        with suppress(HipressError):
            self._call(lambda store: forget(store, keys))

    def _choice(self, leaving: bool, end: float) -> str:
        """The round after the last that this site knew, as in the store, or a later one."""
        number, sites, _ = _parsed(self._last)
        number += 1
        self._call(lambda store: add_line(store, f"round {number}", [self.id, leaving]))
        awaited = {*sites}  # leavers until they have left: their round may have been undone
        member = not self._last or (self.id in awaited and self._has_agreed())
        impatient = time.monotonic() + self.patience
        for pause in backoff():
            self._refuse_parted()
            ended = self._ended(awaited - {self.id})
            present, last = self._come_to(number)
            if last != self._last:
                return last
            late = awaited - ended - present.keys()
            few = not self._last and len(present) < self.expected
            waits = late or few
            patient = time.monotonic() < (impatient if member else end)
            if not (waits and patient):
                if late and not member:
                    raise AgreementTimeout(
                        f"site {self.id} waited {self.timeout:g} s for a round of sites "
                        f"{', '.join(map(str, sorted(late)))}"
                    )
                break
            time.sleep(pause)
        if awaited and not member and not (awaited - {self.id}) & present.keys():
            log.warning(
                "hipress: site %d: all sites of round %d have ended: training goes on from what "
                "newcomers have, and what those had agreed on is lost but for checkpoints",
                self.id, number - 1,
            )  # fmt: skip
        leavers = [site for site, leaves in present.items() if leaves]
        own = json.dumps([number, sorted(present), sorted(leavers)])
        return self._call(lambda store: store.compare_set("last", self._last, own)).decode()

    def _has_agreed(self) -> bool:
        """False if others may have agreed on weights that this site does not have."""
        return self._current or not self._call(lambda store: read_notes(store, {0: "begun"}))

    def _come_to(self, number: int) -> tuple[dict[int, bool], str]:
        """The sites that have come to a round, True for those that leave after it; the last round,
        as in the store."""
        return self._call(
            lambda store: (dict(read_lines(store, f"round {number}")), _last_round(store))
        )

    def _decide(self, well: bool) -> bool:
        """True if all sites have the average. well: this one has it."""
        number, sites, _ = _parsed(self._last)
        others, name = {*sites} - {self.id}, f"end of {number}"
        ended = decide(self._call, name, self.id, others, well, self._ended, self.patience)
        if ended and not self._current:
            self._call(lambda store: store.set("begun", "true"))
        return ended

    def _ended(self, sites: set[int]) -> set[int]:
        """Sites, of these, that have left, or whose processes are known to have ended."""
        left = sites.intersection(self._call(lambda store: read_lines(store, "left")))
        epoch, end = self._epoch, time.monotonic() + self.patience
        call_store(epoch.store, lambda store: epoch.meet(sites, store), end, self.id)
        return {*left, *epoch.ended(sites)}

    def _call(self, call: Callable[[Store], T]) -> T:
        """A call to the store, on a connection of this. Raises the errors of `call_store`."""
        return call_store(self._store, call, time.monotonic() + self.patience, self.id)

    def _by_leader(self, call: Callable[[], T]) -> T:
        """The result of a call that the site's first rank makes, as JSON has it, at all of them."""
        if self._site is None:
            return call()
        with self._site.failures_told():
            own = call() if self._shard == 0 else None
        result: T = self._collect(self._site, own)[0]
        return result

    def _all_well(self, well: bool) -> bool:
        """True if all ranks of the site have their averages."""
        return well if self._site is None else all(self._collect(self._site, well))

    def _collect(self, site: Coordinator, own: Any) -> list[Any]:
        """Values of the site's ranks. Raises the error of another one."""
        with _errors_of_the_site():
            return site.require_equal({}, own)

    def _refuse_parted(self) -> None:
        """Raise the error of another rank of the site that takes no part any more."""
        stop = None if self._site is None else self._site.gone()
        if self._site is not None and stop is not None:
            with _errors_of_the_site():
                raise stop.error(self._site.mailbox.here)


@contextmanager
def _errors_of_the_site() -> Iterator[None]:
    """Another rank's error, which a coordinator raises as a ConfigMismatch, as a SyncError."""
    try:
        yield
    except ConfigMismatch as error:
        raise SyncError(str(error)) from error


def decide(
    call: Call,
    name: str,
    me: int,
    others: set[int],
    well: bool,
    ended: Callable[[set[int]], set[int]],
    patience: float,
) -> bool:
    """True, at all sites, if all have a round's average: see [Note: rounds in a store].

    call: of a store that these sites share; name: of the round's end there; well: this site, `me`,
    has the average; ended: those of some sites that live no more; patience: seconds to wait.
    """
    end, outcome = time.monotonic() + patience, False
    _, list_of_well = decision_keys(name)
    if well:
        call(lambda store: add_line(store, list_of_well, me))
    for pause in backoff() if well else ():
        gone = ended(others)  # first: all notes of ended sites can be seen then
        found = {*call(partial(read_lines, key=list_of_well))}
        if call(partial(read_notes, keys={0: name})) or others <= found:
            outcome = True
            break
        if (others - found) & gone or time.monotonic() > end:
            break
        time.sleep(pause)
    own = json.dumps(outcome)
    first: bool = json.loads(call(lambda store: store.compare_set(name, "", own)))
    return first


def decision_keys(name: str) -> tuple[str, str]:
    """Keys in the store of a decision, and of the list of those that are well."""
    return name, f"{name}, well"


def forget(store: Store, keys: Iterable[str]) -> None:
    """Delete what nobody reads any more."""
    for key in keys:
        store.delete_key(key)


def _last_round(store: Store) -> str:
    """The last round, as in the store; "" for none."""
    return store.get("last").decode() if store.check(["last"]) else ""


def _parsed(last: str) -> tuple[int, list[int], list[int]]:
    """Number, sites and leaving sites of a round."""
    number, sites, leaving = json.loads(last) if last else (-1, [], [])
    return number, sites, leaving
