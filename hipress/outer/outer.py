"""Outer: average weights once in many steps, compressed."""

from __future__ import annotations

import inspect
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from casync.errors import CasyncError
from hipress import compat
from hipress import options as options_
from hipress.arguments import group_of
from hipress.codecs import refuse_misspelt
from hipress.errors import (
    ConfigError,
    ConfigMismatch,
    HipressError,
    StateError,
    SyncError,
    unknown,
)
from hipress.model import shards
from hipress.model.params import as_module
from hipress.model.torch_modes import without_inference_mode
from hipress.options import AUTO, refuse_foreign
from hipress.outer.fragments import Fragment, by_parameter
from hipress.outer.members import FixedMembers, Members, failures_told
from hipress.outer.outer_report import OuterReport
from hipress.outer.roster import Roster
from hipress.outer.rounds import Round
from hipress.outer.schedule import PRESETS, OuterSGD, Schedule
from hipress.outer.site_model import SiteModel, refuse_averaged
from hipress.outer.sites import Sites
from hipress.ranks import coordinator as coordinators
from hipress.ranks.coordinator import Coordinator, compare
from hipress.ranks.link import connect, group_timeout, share
from hipress.ranks.store import run_in_thread

if TYPE_CHECKING:
    from casync.codec import Codec

log = logging.getLogger("hipress")
NEW = -1  # rounds of a site that has no agreed weights yet
TRIES = 20  # rounds in a row that may be undone
GIVE_TRIES = 3  # and in which a leaving site may fail to hand over what it has not delivered
GIVING = "what a site leaves"


#: those that have not ended
_OPEN: weakref.WeakSet[Outer] = weakref.WeakSet()


class _Refused(SyncError):
    """Another site has a different model or options."""


class Outer:
    """Sites train alone, each with its own optimizer, and average their weights every `every`
    steps, compressed: DiLoCo with any compressor.

    ::

        outer = hipress.Outer(model, optimizer, "int4_group", every=100, delay=20)
        loss.backward()
        optimizer.step()
        outer.step()  # or once: optimizer.register_step_post_hook(outer.step)

    A round sends the pseudo-gradient, agreed weights minus the site's, steps the agreed weights by
    its average (`outer`), and moves the site's weights there. After it all sites hold the same
    agreed weights, bit for bit. Between rounds nothing travels, and sites may skip steps, clip
    gradients, accumulate and schedule learning rates as with a lone optimizer.

    A site is a process, or several that train together by DDP, `hipress.wrap`, a Synchronizer or
    FSDP2: then `process_group` has the ranks, one of each site, that hold the same shard.

    `hipress.state_dict`, `load_state_dict`, `report` and `detach` take it.
    """

    @without_inference_mode()
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: str | os.PathLike[str] | Codec = "int4_group",
        *,
        every: int = 100,
        fragments: int = 1,
        delay: int = 0,
        mix: float | None = None,
        outer: OuterSGD | None = None,
        clip: str | None = None,
        keep: str = "float32",
        members: Members | None = None,
        strategy: str = AUTO,
        down: str | os.PathLike[str] | Codec | None = AUTO,
        exclude: str | Iterable[str] = (),
        min_size: SupportsIndex | None = None,
        seed: SupportsIndex = 0,
        timeout: float | timedelta | None = None,
        checksum: bool = False,
        rules: Mapping[str, Any] | str | os.PathLike[str] = MappingProxyType({}),
        process_group: dist.ProcessGroup | None = None,
        name: str | None = None,
        **params: Any,
    ) -> None:
        """Connect the sites; all begin with the weights and buffers of the first.

        Args:
            model: of float32, float16 or bfloat16, with or without DDP, fully_shard or
                torch.compile. Compression is done on the host.
            optimizer: that of this site, to be checked; any, if it has several.
            compressor: of pseudo-gradients, in both directions; its feedback keeps what a round
                leaves out for the next.
            every: steps from a round of a fragment to its next.
            fragments: parts of the model of about equal size, which have their rounds in turn,
                `every / fragments` steps apart.
            delay: steps after which a round's average is used. Meanwhile it travels, and training
                goes on. Less than `every / fragments`.
            mix: None: a site takes the agreed weights, and adds what its own steps changed in the
                delay. A share in (0, 1], as Streaming DiLoCo has it: the weights become (1 - mix)
                of the site's and mix of the agreed ones.
            outer: steps agreed weights; by default OuterSGD(lr=0.7, momentum=0.9).
            clip: "median": a site whose pseudo-gradient is longer than the sites' median shortens
                it to that.
            keep: the type of agreed weights in memory, "float32" or "bfloat16", rounded at random.
            members: who takes part in a round; by default the ranks of `process_group`, always.
            process_group: of ranks at different sites; by default of all ranks.
            name: of this site, for reports and the log; by default that of its host.

        Other options as for `wrap`. Raises ConfigError, ConfigMismatch, AgreementTimeout and
        RankLost as `wrap` does.
        """
        if members is not None and not isinstance(members, Members):
            raise ConfigError(
                f"members is a hipress.StoreMembers or a hipress.TorchftMembers, not {members!r}"
            )
        group: dist.ProcessGroup | None = None
        if members is None:
            group = group_of(process_group)
            patience, told = group_timeout(group), coordinators.failures_told(group)
        else:
            patience, told = timedelta(seconds=members.patience), failures_told(members)
        timeout = patience if timeout is None else timeout
        with told:
            first: object = model
            if isinstance(first, Optimizer):
                raise ConfigError("the model comes first: hipress.Outer(model, optimizer)")
            if members is not None and process_group is not None:
                raise ConfigError("members choose the ranks: leave process_group out")
            refuse_foreign("Outer", params, "it averages weights between sites, not gradients")
            takes = inspect.signature(Outer.__init__).parameters
            refuse_misspelt("Outer", takes, compressor, params)
            options = options_.make(
                compressor, strategy=strategy, down=down, exclude=exclude, min_size=min_size,
                seed=seed, timeout=timeout, checksum=checksum, rules=rules, params=params,
            )  # fmt: skip
            self.schedule = Schedule(
                every, fragments, delay, mix, OuterSGD() if outer is None else outer, clip, keep
            )
            self.module, self._options, self.group = model, options, group
            inner = as_module(model)
            self._model = SiteModel.of(inner, optimizer, options, self.schedule)
            refuse_averaged(inner, group)
            _refuse_second(inner, members)
            roster = Roster(name)
        self.fragments = self._model.fragments
        if members is not None:
            self._members = members
        elif group is not None:
            self._members = FixedMembers(group, options.timeout)
        self.rounds = NEW  # rounds that all sites have ended
        self.steps = 0  # since the begin of the last round
        self._sites: Sites | None = None
        self._notes: list[dict[str, Any]] = []  # of the sites, by rank
        self._roster = roster
        self.round: Round | None = None
        self._ended: BaseException | str | None = None  # the reason why there are no more rounds
        self.has_left = False  # this site has ended its last round
        self.undone = 0  # rounds that were
        #: rounds undone since the last that was committed, but for those of a refused site
        self._undone_in_a_row = 0
        self._not_given = 0  # rounds in a row in which `_give` failed here
        self.stalled = 0.0  # seconds in step()
        self.sent_bytes = 0  # by connections that have ended
        self._started = time.perf_counter()
        _OPEN.add(self)
        #: lets others not wait for one that is dropped; in a thread: it may be collected anywhere
        self._dropped = weakref.finalize(self, run_in_thread, self._members.close)
        self._dropped.atexit = False
        with self._ends_on_error():
            while self.rounds == NEW:
                self._begin()

    @classmethod
    def preset(cls, name: str, model: nn.Module, optimizer: Optimizer, **options: Any) -> Outer:
        """An outer loop with the numbers of a paper, but for the given options.

        name: "diloco" (Douillard et al. 2023), "streaming" (Streaming DiLoCo, Douillard et al.
        2025), "sparseloco" (SparseLoCo, Sarfi et al. 2025, with the median of norms of
        Covenant-72B) or "muloco" (Therien et al. 2025; `optimizer` is then Muon).
        """
        if name not in PRESETS:
            raise unknown("preset of Outer", name, PRESETS)
        return cls(model, optimizer, **{**PRESETS[name], **options})

    @compat.untraced
    @without_inference_mode()
    def step(self, *_: object) -> None:
        """Count a step of this site, and begin or end a round that is due.

        Every site must call it equally often, after each step of its optimizer, also after one that
        a GradScaler skipped. Arguments are ignored, so that it may be a hook of the optimizer.

        With members that change, a failed round is undone, and the next one delivers what it had;
        if 20 in a row are undone, other than to refuse a site, this raises SyncError with the
        reason of the last. Otherwise it raises the first failure, which names rank, peer and task
        (RankLost, AgreementTimeout or SyncError). After an error every further step raises
        SyncError.
        """
        self._refuse_ended()
        begin = time.perf_counter()
        try:
            with self._ends_on_error():
                self.steps += 1
                if self.round is not None and self.steps == self.schedule.delay:
                    self._end()
                if self.steps == self.schedule.spacing:
                    self.steps = 0
                    self._begin()
        finally:
            self.stalled += time.perf_counter() - begin

    @without_inference_mode()
    def leave(self) -> None:
        """Take part in one more round (with TorchftMembers in two), which begins when the other
        sites come to theirs, hand the rest of what this site has not delivered to another one, and
        end.

        Raises ConfigError if sites do not change, and else as `step` does."""
        self._refuse_ended()
        if not self._members.changes:
            raise ConfigError("the ranks of a group cannot leave: all of them hipress.detach")
        with self._ends_on_error():
            if self.round is not None:
                self._end()
            self.steps = 0
            while self._ended is None and not self.has_left:
                self._begin(leaving=True)
                if self.round is not None:
                    self._end()
            self.close("it has left")

    def close(self, why: str = "hipress is detached from it") -> None:
        """End connections; further steps raise SyncError."""
        self._ended = self._ended or why
        _OPEN.discard(self)
        self._dropped.detach()
        self._part()
        self._members.close()

    def agreed(self) -> dict[str, torch.Tensor]:
        """Copies of the weights that sites agreed on last, by parameter, as float32 on the host, of
        FSDP2 this rank's shards; also when this has ended. `model.load_state_dict(outer.agreed(),
        strict=False)` puts them in a model that DDP does not wrap."""
        return by_parameter(self.fragments, lambda fragment: fragment.agreed.float())

    def connected(self) -> Sites:
        """The sites of the last round. Raises StateError if there are none."""
        if self._sites is None:
            why = self._ended or "the last round was undone; save and load after the next one"
            raise StateError(f"no site is connected with this one: {why}")
        return self._sites

    @property
    def calls_so_far(self) -> int:
        """Number of the next exchange of sites that meet now; the same at all of them."""
        return self.rounds * sum(len(fragment.bundles) for fragment in self.fragments)

    def report(self) -> OuterReport:
        """Counts and costs so far."""
        memory: Counter[str] = Counter()
        for fragment in self.fragments:
            memory.update(fragment.bytes_by_use())
        if self._sites is not None:
            memory["states"] = self._sites.states.nbytes
        memory["round"] = 0 if self.round is None else self.round.held_bytes
        now = 0 if self._sites is None else round(self._sites.counters.wire_bytes)
        return OuterReport(
            sites=len(self._roster.names),
            names=self._roster.names,
            ended=str(self._ended or ""),
            rounds=self.rounds,
            undone=self.undone,
            seconds=time.perf_counter() - self._started,
            stalled=self.stalled,
            sent_bytes=self.sent_bytes + now,
            memory=dict(memory),
            schedule=f"{self._model.plan.label}, {self.schedule}",
        )

    # A round, in the order of events

    def _begin(self, leaving: bool = False) -> None:
        """Meet the other sites, and send a fragment's pseudo-gradient."""
        model = self._model.module
        shards.reshard(model)
        self._model.snapshot.refuse_changes(model)
        refuse_averaged(model, self.group)
        for each in self.fragments if self.rounds != NEW else ():
            each.refuse_infinite()
        coordinator = self._members.meet(leaving=leaving)
        if self._sites is None or coordinator is not self._sites.coordinator:
            error = self._error_of(lambda: self._gather(coordinator, leaving))
            if error is not None:
                self._undo(error)
                return
        assert self._sites is not None
        counted = [rank for rank, each in enumerate(self._notes) if each["rounds"] != NEW]
        self._notes = [{**each, "rounds": self.rounds} for each in self._notes]
        if not counted:  # the first meeting of all: they have nothing to average
            self._members.commit(None)
            return
        fragment = self.fragments[self.rounds % len(self.fragments)]
        self.round = Round.of(fragment, self._sites, self.schedule, counted)
        self.round.start()
        if not self.schedule.delay:
            self._end()

    def _end(self) -> None:
        """Wait for the average, and take it over, if all sites have it; else undo the round."""
        assert self.round is not None
        shards.reshard(self._model.module)
        round_, self.round = self.round, None
        given: dict[int, list[torch.Tensor] | None] = {}
        error = self._error_of(round_.wait)
        if error is None:
            error = self._error_of(partial(self._give, round_, given))
            self._not_given = 0 if error is None else self._not_given + 1
        if error is not None:
            self._undo(error, round_)
        elif not self._members.commit(None):
            self._undo(None, round_)
        else:
            round_.commit(seed=self.rounds)
            self._roster.part()
            here = round_.sites.coordinator.mailbox.here
            ends = all(note["leaving"] for note in self._notes)
            tell = log.info if ends else log.warning  # a training that ends may lose it
            for site, left in given.items():
                if left is None:
                    who = "this site" if site == here else f"site {site}"
                    tell("hipress: what %s had not delivered as it left is lost", who)
                else:
                    for fragment, values in zip(self.fragments, left, strict=True):
                        fragment.owe(values)
            self.rounds += 1
            self._undone_in_a_row = 0
            self.has_left = bool(self._notes[round_.sites.coordinator.rank]["leaving"])

    def _undo(self, error: HipressError | None, round_: Round | None = None) -> None:
        """Go back to the begin of a round. Raises the error if sites do not change, and SyncError
        after TRIES in a row, but for rounds in which a site was refused: a scheduler may start it
        again and again."""
        if self._sites is not None and error is not None:
            self._sites.close()
        if error is not None:
            self._members.commit(error)
        if round_ is not None:
            round_.undo()
        self.undone += 1
        if not isinstance(error, _Refused):
            self._undone_in_a_row += 1
        why = error or "another site could not end it"
        log.warning(
            "hipress: round %d of the outer loop is undone, the next has what it had: %s",
            self.rounds, why,
        )  # fmt: skip
        if self._undone_in_a_row == TRIES:
            raise SyncError(f"{TRIES} rounds in a row were undone, the last because: {why}")

    def _gather(self, coordinator: Coordinator, leaving: bool) -> None:
        """Connect with these sites, and give the agreed weights to those that lack them."""
        self._part()
        own: dict[str, Any] = {
            "rounds": self.rounds,
            "leaving": leaving,
            "not given": self._not_given,
        }
        own |= self._roster.own
        if self._members.changes:
            notes = coordinator.require_equal({}, {**own, "facts": self._model.facts})
            self._refuse_others(notes, coordinator)
        else:
            notes = coordinator.require_equal(self._model.facts, own)
        self._catch_up([each["rounds"] for each in notes], coordinator)
        bundles = [bundle for fragment in self.fragments for bundle in fragment.bundles]
        self._sites = Sites(
            coordinator, self._model.plan, self._options, bundles, calls=self.calls_so_far,
            changes=self._members.changes,
        )  # fmt: skip
        self._notes = notes
        self._roster.meet(coordinator, notes)

    def _catch_up(self, rounds: list[int], coordinator: Coordinator) -> None:
        """Take agreed weights and momentum from the first site that has ended most rounds."""
        most = max(rounds)
        source = rounds.index(most)
        behind = [r for r, count in enumerate(rounds) if count < most or most == NEW]
        behind = [r for r in behind if r != source]
        if behind and coordinator.rank in (source, *behind):
            some, here = coordinator.of([source, *behind]), self._model.shared
            # the source may end while it sends
            sent = here if coordinator.rank == source else [each.clone() for each in here]
            share(sent, connect(some, "agreed weights"), some)
            if coordinator.rank != source:
                self._adopt(here, sent)
        self.rounds = max(most, 0)

    def _adopt(self, here: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
        """Take over what another site has sent. This one's own steps since its last round, if it
        has had any, count in the next."""
        before = [fragment.target() for fragment in self.fragments]
        for own, other in zip(here, sent, strict=True):
            own.copy_(other)
        for fragment, old in zip(self.fragments, before, strict=True):
            goal = fragment.target()
            if self.rounds != NEW:
                goal.add_(fragment.weights()).sub_(old)
            fragment.write(goal)

    def _give(self, round_: Round, given: dict[int, list[torch.Tensor] | None]) -> None:
        """Give what leaving sites will not have delivered to the first that stays, in `given`, by
        site and fragment; None for what is lost: all sites leave, or GIVE_TRIES rounds failed here.

        It counts if the round is committed: so it is neither lost nor given twice, whatever happens
        to one of the two."""
        leavers = [rank for rank, each in enumerate(self._notes) if each["leaving"]]
        stay = [rank for rank, each in enumerate(self._notes) if not each["leaving"]]
        coordinator = round_.sites.coordinator
        for leaver in leavers:
            pair = [leaver, *stay[:1]]
            if coordinator.rank not in pair:
                continue
            failures = max(self._notes[rank]["not given"] for rank in pair)
            if not stay or failures >= GIVE_TRIES:
                given[coordinator.ranks[leaver]] = None
                continue
            left = [self.left(each, sent=each is round_.fragment) for each in self.fragments]
            both = coordinator.of(pair)
            share(left, connect(both, GIVING), both)
            both.wait_for_all(GIVING)  # the first may end then
            if coordinator.rank != leaver:
                given[coordinator.ranks[leaver]] = left

    def _part(self) -> None:
        """End the connections; what codecs held back is owed to the next sites."""
        if self._sites is None:
            return
        self._sites.close()
        for fragment in self.fragments:
            for bundle in fragment.bundles:
                left = self._sites.undelivered(bundle)
                if left is not None and left.any():
                    fragment.owe(left, bundle.part)
        self.sent_bytes += round(self._sites.counters.wire_bytes)
        self._sites = None

    # Parts of the above

    def _refuse_others(self, notes: list[dict[str, Any]], coordinator: Coordinator) -> None:
        """Raise ConfigMismatch if this site differs from the one that has ended most rounds, and
        _Refused if another does."""
        first = max(range(len(notes)), key=lambda rank: (notes[rank]["rounds"], -rank))
        names = coordinator.ranks
        for rank in (coordinator.rank, *range(len(notes))):
            try:
                compare([notes[first]["facts"], notes[rank]["facts"]], [names[first], names[rank]])
            except ConfigMismatch as error:
                if rank == coordinator.rank:
                    self._ended = error  # others go on without it
                    raise
                raise _Refused(f"site {names[rank]} is refused: {error}") from error

    def left(self, fragment: Fragment, *, sent: bool = False) -> torch.Tensor:
        """Pseudo-gradient of this site that has not been delivered, with that of its steps since
        the last round. sent: but for what a round of the fragment, under way, delivers."""
        flat, sites = torch.zeros(fragment.elements) if sent else fragment.change(), self._sites
        if fragment.undelivered is not None and not sent:
            flat += fragment.undelivered
        for bundle in fragment.bundles:
            left = None if sites is None else sites.undelivered(bundle)
            if left is not None:
                flat[bundle.part] += left
        return flat

    def _error_of(self, call: Callable[[], object]) -> HipressError | None:
        """The error of a call that waits for other sites."""
        try:
            call()
        except HipressError as error:
            if error is self._ended:
                raise
            return error
        except CasyncError as error:
            assert self._sites is not None
            named = self._sites.coordinator.named(error, f"round {self.rounds} of the outer loop")
            assert isinstance(named, HipressError)
            return named
        return None

    @contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """End after an error."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """End after an error, and let the other sites know."""
        self._ended = error
        _OPEN.discard(self)
        self._dropped.detach()
        if self._sites is not None:
            self._sites.close()
        self._members.fail(error)
        if self._members.changes:
            self._members.close()

    def _refuse_ended(self) -> None:
        if isinstance(self._ended, BaseException):
            raise SyncError(f"the outer loop has failed: {self._ended}") from self._ended
        if self._ended is not None:
            raise SyncError(f"the outer loop has ended: {self._ended}")


def _refuse_second(model: nn.Module, members: Members | None) -> None:
    """Raise ConfigError if another Outer averages some of this model, or has these members."""
    mine = {*model.parameters()}
    for other in [*_OPEN]:
        same = "members" if members is not None and other._members is members else ""
        if same or mine & {*other._model.module.parameters()}:
            raise ConfigError(
                f"another hipress.Outer has {'these members' if same else 'this model'}: "
                "hipress.detach it first, or train with it"
            )
