"""Sites of a torchft quorum."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import TCPStore

from hipress.compat import PrefixStore, Store
from hipress.errors import AgreementTimeout, ConfigError, HipressError
from hipress.outer.members import seconds
from hipress.outer.store_members import decide, decision_keys, forget
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.liveness import address_towards
from hipress.ranks.mailbox import StoreMailbox, backoff
from hipress.ranks.store import call_store, read_notes

log = logging.getLogger("hipress")

T = TypeVar("T")
TIDY_SECONDS = 5.0  # seconds at most of a call to the store after a round has ended
LEAVES = " leaves"  # ends the key of the note that a site leaves after the next round
_USED = ("start_quorum", "wait_quorum", "should_commit", "report_error", "shutdown", "_pg")


class TorchftMembers:
    """Sites that a torchft.Manager finds by its lighthouse.

    ::

        manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), use_async_quorum=False, ...)
        outer = hipress.Outer(model, optimizer, members=hipress.TorchftMembers(manager))

    A round is a step of the manager: a quorum at its begin, `should_commit` at its end. Its process
    group is not connected: hipress connects the sites itself, and newcomers get agreed weights from
    it, not from the manager's checkpoints, so `state_dict` of the manager may be empty. A commit of
    torchft is a replica group's own: one that refuses is a vote against the round, and all sites
    settle in the quorum's store that they undo it, or none does. That store may end with the site
    that keeps it before all have read there how a round ended, so those that have tell it to the
    others: see `_heard`. A site that does not learn it, since others are silent, too, ends: it
    could count twice, or be left behind. torchft does not tell who leaves, so a site that does
    tells it at the end of a round, takes part in one more, hands over what it has not delivered,
    and ends its manager.

    For torchft 0.2, and its nightly versions, where a process group is reconfigured by handles.
    """

    changes = True

    def __init__(self, manager: Any, *, patience: float | timedelta = 60.0) -> None:
        """manager: one for each site, of one rank; or for each rank of a site. patience: seconds to
        wait for another site in a round. Raises ConfigError for another object, or a version of
        torchft without the methods that this needs."""
        absent = [name for name in _USED if not hasattr(manager, name)]
        if absent:
            raise ConfigError(
                f"TorchftMembers needs a torchft.Manager, of torchft 0.2 or a nightly version of "
                f"2026 (pip install 'hipress[elastic]'): {type(manager).__name__} lacks "
                f"{', '.join(absent)}"
            )
        self.patience, self._manager = seconds("patience", patience), manager
        self._group = manager._pg = QuorumGroup(manager._pg, self.patience)
        self._coordinator: Coordinator | None = None
        self._quorum, self._committed, self._meetings = 0, False, 0
        self._leaving = False  # this site, and the others have yet to be told
        self._parting = False  # a site leaves after the next round

    def meet(self, *, leaving: bool) -> Coordinator:
        """Implements Members.meet, by a quorum. Raises HipressError if there is none, since the
        lighthouse does not answer, for example."""
        group, end = self._group, time.monotonic() + self.patience
        self._leaving = leaving
        self._find_quorum()
        while group.store is None and time.monotonic() < end:  # the site that kept it has died
            self._manager.should_commit()  # which fails, so the next quorum is a new one
            self._find_quorum()
        if group.store is None:
            raise HipressError("the store of torchft's quorum does not answer")
        kept = self._committed and not self._parting and self._quorum == group.quorum
        if self._coordinator is None or not kept:
            self._meetings = self._meetings + 1 if self._quorum == group.quorum else 1
            self._quorum, self._number = group.quorum, 0
            self._coordinator = Coordinator.on(
                group.store, group.rank, range(group.size), f"meeting {self._meetings}",
                self.patience,
            )  # fmt: skip
        self._number += 1
        return self._coordinator

    def _find_quorum(self) -> None:
        try:
            self._manager.start_quorum()
            self._manager.wait_quorum()
        except (RuntimeError, TimeoutError) as error:
            raise HipressError(
                f"torchft found no quorum: {error}. Is the lighthouse (TORCHFT_LIGHTHOUSE) there?"
            ) from error

    def commit(self, error: HipressError | None) -> bool:
        """Implements Members.commit, by the manager's word, and then a vote of the sites. Raises
        AgreementTimeout if this site cannot learn how they voted."""
        assert self._coordinator is not None
        mailbox, store = self._coordinator.mailbox, self._coordinator.mailbox.store

        def call(asked: Callable[[Store], T], seconds: float = self.patience) -> T:
            return call_store(store, asked, time.monotonic() + seconds, mailbox.here)

        def ended(sites: set[int]) -> set[int]:
            call(lambda store: mailbox.epoch.meet(sites, store))
            return {*mailbox.epoch.ended(sites)}

        others = {*mailbox.ranks} - {mailbox.here}
        before, name = (f"end of {self._meetings}.{self._number - back}" for back in (1, 0))
        leaves = name + LEAVES
        if error is not None:
            self._manager.report_error(error)
        well = self._manager.should_commit() and error is None  # before others can count on it
        try:
            if self._leaving:  # first: whoever sees that all are well sees this, too
                call(lambda store: store.set(leaves, "true"))
            agreed = decide(call, name, mailbox.here, others, well, ended, self.patience)
        except HipressError as silence:
            log.warning("hipress: how a round ended is asked of other sites: %s", silence)
            # no other site can have seen that all are well unless this one is
            agreed = well and _heard(mailbox, self._number, others, self.patience)
        mailbox.epoch.tell(_told_key(mailbox, mailbox.here), [self._number, agreed])
        tidy = min(self.patience, TIDY_SECONDS)
        with suppress(HipressError):  # then the next quorum has another store
            self._parting = 0 in call(lambda store: read_notes(store, {0: leaves}), tidy)
            if agreed and mailbox.rank == 0:  # all have come here from the round before
                old = *decision_keys(before), before + LEAVES
                call(lambda store: forget(store, old), tidy)
        self._committed = agreed
        return agreed

    def fail(self, error: BaseException) -> None:
        """Do nothing: each rank of a site has a manager, which misses it."""

    def close(self) -> None:
        """Shut the manager down."""
        self._manager.shutdown(wait=False)


def _heard(mailbox: StoreMailbox, number: int, others: set[int], patience: float) -> bool:
    """True if all sites have a round's average, as another tells, without the store.

    Who knows it tells it. Who does not tells which sites have ended, once it has read all that they
    told. If all that live tell that of the same sites, none of them has committed the round, nor
    will, so it is undone. Raises AgreementTimeout if others are silent for `patience` seconds."""
    end, ended = time.monotonic() + patience, None
    for pause in backoff():
        gone = {*mailbox.epoch.ended(others)}  # first: all that they told has been heard then
        told = mailbox.epoch.heard(others)
        words = {site: told.get(_told_key(mailbox, site), [0, []]) for site in others}
        if any(last > number for last, _ in words.values()):
            return True  # a later round of this meeting follows one that went well
        known = [word for last, word in words.values() if last == number and word in (True, False)]
        if known:
            return bool(known[0])
        if gone != ended:
            ended = gone
            mailbox.epoch.tell(_told_key(mailbox, mailbox.here), [number, [*gone]])
        silent = {s for s in others - gone if words[s][0] < number or not gone <= {*words[s][1]}}
        if not silent:
            return False
        if time.monotonic() > end:
            break
        time.sleep(pause)
    names = ", ".join(map(str, sorted(silent)))
    raise AgreementTimeout(
        f"site {mailbox.here} waited {patience:g} s to learn how a round of the outer loop ended: "
        f"neither the quorum's store nor site {names} answers. Others may have committed it, so "
        f"this site ends; start it again, and it gets the agreed weights"
    )


def _told_key(mailbox: StoreMailbox, site: int) -> str:
    """Key of a site's note on a meeting's last round: its number, and True or False, or the sites
    that have ended."""
    return f"{mailbox.name}, end, {site}"


class QuorumGroup:
    """Stands in for the manager's process group, and takes down how it is to be configured."""

    supports_reconfigure = True

    def __init__(self, inner: Any, patience: float) -> None:
        """inner: the process group, which answers all other questions."""
        self._inner, self._patience = inner, timedelta(seconds=patience)
        self._own: TCPStore | None = None
        self.store: Store | None = None  # of the quorum's sites
        self.rank, self.size, self.quorum = 0, 0, 0

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *rest: Any
    ) -> None:
        """Take down a quorum, as torchft 0.2 tells it. store_addr: host:port/prefix."""
        address, _, prefix = store_addr.partition("/")
        self._take(address, prefix, rank, world_size)

    def get_reconfigure_handle(self) -> str:
        """The address of a store of this site, host:port, for its handle in nightly versions."""
        if self._own is None:
            host = "localhost"
            with suppress(OSError):  # no route to other machines
                host = address_towards("192.0.2.1")
            self._own = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"{self._own.host}:{self._own.port}"

    def reconfigure(self, options: Any) -> None:
        """Take down a quorum, as nightly versions tell it: `uuid`, and `handles` by rank."""
        handles = [*options.handles]
        rank = handles.index(self.get_reconfigure_handle())
        self._take(handles[0], str(options.uuid), rank, len(handles))

    def _take(self, address: str, prefix: str, rank: int, size: int) -> None:
        self.store = None
        host, _, port = address.rpartition(":")
        try:
            client = TCPStore(
                host.strip("[]"), int(port), is_master=False, wait_for_workers=False,
                timeout=self._patience,
            )  # fmt: skip
        except RuntimeError as error:
            raise HipressError(
                f"no answer from the quorum's store at {address}: {error}"
            ) from error
        self.store = PrefixStore(f"hipress/{prefix}", client)
        self.rank, self.size, self.quorum = rank, size, self.quorum + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
