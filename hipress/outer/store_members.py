"""Sites that come and go, by a key-value store."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from hipress import compat
from hipress.compat import PrefixStore, Store
from hipress.errors import AgreementTimeout, ConfigError, HipressError
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

    [Note: rounds in a store] Rounds are numbered. A site that comes to a round says so, and waits
    for the sites of the round before, but for those whose processes have ended and those that left.
    Then it proposes all that have come as the sites of the round. The store keeps the first
    proposal, so all sites have the same. A newcomer comes to the next round and waits until it is
    proposed. As long as it has ended no round, and others have, it does not go on without them,
    however late they are: it would begin anew. In the same way a round is committed: by the first
    that sees that all sites have the average, unless another has proposed before to undo it, since
    it waited in vain. Who has come, has the average, or has left adds a line to a list, which a
    site reads by one request: its requests in a round do not grow with the number of sites.
    """

    changes = True

    def __init__(
        self,
        store: Store,
        *,
        expected: int = 1,
        patience: float = 60.0,
        timeout: float = 1800.0,
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
        """
        for name, value in (("patience", patience), ("timeout", timeout)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} is a positive number of seconds, not {value}")
        if not compat.has_requests_of_several_keys(store):
            raise ConfigError(f"StoreMembers needs a TCPStore: {type(store).__name__} has no lists")
        self.expected, self.patience, self.timeout = expected, patience, timeout
        self._site, self._shard = site, 0 if site is None else dist.get_rank(site)
        own = compat.another_client(store)
        self._store: Store = PrefixStore("hipress/outer", own)
        #: for each rank of a site, since it meets with its like
        self._shards: Store = PrefixStore(f"shard {self._shard}", self._store)
        self._round = -1  # number of the last meeting
        self._sites: list[int] = []  # of it, in the order of coming
        self._coordinator: Coordinator | None = None
        self._committed = False
        self._ended_one = False  # this site has ended a round well
        self.id = 0  # until the store has given one
        self.id = self._by_leader(self._come)

    def meet(self, *, leaving: bool) -> Coordinator:
        """Implements Members.meet. See [Note: rounds in a store]."""
        before = self._sites
        self._round, self._sites, gone = self._by_leader(lambda: self._meet(leaving))
        kept = self._committed and self._sites == before and not gone
        if self._coordinator is None or not kept:
            rank = self._sites.index(self.id)
            name = f"round {self._round}"
            self._coordinator = Coordinator.on(self._shards, rank, self._sites, name, self.patience)
        return self._coordinator

    def commit(self, error: HipressError | None) -> bool:
        """Implements Members.commit."""
        well = self._all_well(error is None)
        self._committed = self._by_leader(lambda: self._decide(well))
        self._ended_one = self._ended_one or self._committed
        return self._committed

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
        self._previous: dict[str, list[int]] | None = None
        last = read_notes(self._store, {0: "last"})
        self._number = last.get(0, -1) + 1  # of the next round, or of an earlier one
        if self._number:
            self._previous = read_notes(self._store, {0: f"sites of {self._number - 1}"})[0]
        return number

    def _meet(self, leaving: bool) -> tuple[int, list[int], list[int]]:
        """Number, sites and leaving sites of the next round that has this site."""
        end = time.monotonic() + self.timeout
        while True:
            number = self._number
            chosen = self._choice(number, leaving, end)
            self._number, self._previous = number + 1, chosen
            if self.id in chosen["sites"]:
                self._call(lambda store, n=number: store.set("last", json.dumps(n)))  # type: ignore[misc]
                return number, chosen["sites"], chosen["leaving"]

    def _choice(self, number: int, leaving: bool, end: float) -> dict[str, list[int]]:
        """The sites of a round, and those of them that leave after it."""
        self._call(lambda store: add_line(store, f"round {number}", [self.id, leaving]))
        before = self._previous or {"sites": [], "leaving": []}
        awaited = {*before["sites"]} - {*before["leaving"]}
        member = self._previous is None or (self.id in awaited and self._knows())
        impatient = time.monotonic() + self.patience
        for pause in backoff():
            ended = self._ended(awaited - {self.id})
            found, chosen = self._come_to(number)
            if chosen is not None:
                return chosen
            late = awaited - ended - found.keys()
            few = self._previous is None and len(found) < self.expected
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
        if awaited and not member and not awaited & found.keys():
            log.warning(
                "hipress: site %d: all sites of round %d have ended: training goes on from what "
                "newcomers have, and what those had agreed on is lost but for checkpoints",
                self.id, number - 1,
            )  # fmt: skip
        leavers = [site for site, leaves in found.items() if leaves]
        own = json.dumps({"sites": sorted(found), "leaving": sorted(leavers)})
        first = self._call(lambda store: store.compare_set(f"sites of {number}", "", own))
        settled: dict[str, list[int]] = json.loads(first)
        return settled

    def _knows(self) -> bool:
        """False if others have ended a round, and this site has not."""
        return self._ended_one or not self._call(lambda store: read_notes(store, {0: "begun"}))

    def _come_to(self, number: int) -> tuple[dict[int, bool], dict[str, list[int]] | None]:
        """The sites that have come to a round, True for those that leave after it; its sites, if
        they are settled."""

        def read(store: Store) -> tuple[dict[int, bool], dict[str, list[int]] | None]:
            come = dict(read_lines(store, f"round {number}"))
            return come, read_notes(store, {0: f"sites of {number}"}).get(0)

        return self._call(read)

    def _decide(self, well: bool) -> bool:
        """True if all sites have the average. well: this one has it."""
        others = {*(self._previous or {"sites": []})["sites"]} - {self.id}
        name = f"end of {self._number - 1}"
        ended = decide(self._call, name, self.id, others, well, self._ended, self.patience)
        if ended and not self._ended_one:
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
        """The result of a call that the site's first rank makes, at all of them."""
        if self._site is None:
            return call()
        told: list[Any] = [None, None]
        if self._shard == 0:
            try:
                told[0] = call()
            except HipressError as error:
                told[1] = error
        dist.broadcast_object_list(told, group=self._site, group_src=0)
        if told[1] is not None:
            raise told[1]
        result: T = told[0]
        return result

    def _all_well(self, well: bool) -> bool:
        """True if all ranks of the site have their averages."""
        if self._site is None:
            return well
        every: list[Any] = [None] * self._site.size()
        dist.all_gather_object(every, well, group=self._site)
        return all(every)


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
    if well:
        call(lambda store: add_line(store, f"{name}, well", me))
    for pause in backoff() if well else ():
        gone = ended(others)  # first: all notes of ended sites can be seen then
        found = {*call(partial(read_lines, key=f"{name}, well"))}
        if call(partial(read_notes, keys={0: name})) or others <= found:
            outcome = True
            break
        if (others - found) & gone or time.monotonic() > end:
            break
        time.sleep(pause)
    own = json.dumps(outcome)
    first: bool = json.loads(call(lambda store: store.compare_set(name, "", own)))
    return first
