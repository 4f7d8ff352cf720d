"""Outer: average weights once in many steps, compressed."""

from __future__ import annotations

import inspect
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hipress import compat, registry
from hipress import options as options_
from hipress.arguments import group_of
from hipress.codecs import refuse_misspelt
from hipress.errors import ConfigError, SyncError, unknown
from hipress.model.params import as_module
from hipress.model.torch_modes import without_inference_mode
from hipress.options import AUTO, refuse_foreign
from hipress.outer import outer_state
from hipress.outer.fragments import by_parameter
from hipress.outer.meeting import NEW, Roster
from hipress.outer.members import FixedMembers, Members, failures_told
from hipress.outer.rounds import Round
from hipress.outer.schedule import PRESETS, OuterSGD, Schedule
from hipress.outer.site import Site
from hipress.outer.site_model import SiteModel, refuse_averaged
from hipress.ranks import coordinator as coordinators
from hipress.ranks.groups import group_timeout
from hipress.ranks.store import run_in_thread
from hipress.reporting.outer_report import OuterReport

if TYPE_CHECKING:
    from casync.codec import Codec

log = logging.getLogger("hipress")


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
            schedule = Schedule(
                every, fragments, delay, mix, OuterSGD() if outer is None else outer, clip, keep
            )
            self.module, self.group = model, group
            site_model = SiteModel.of(as_module(model), optimizer, options, schedule, group)
            refuse_averaged(site_model)
            _refuse_second(site_model, members)
            roster = Roster(name)
        if group is not None:
            members = FixedMembers(group, options.timeout)
        assert members is not None
        self.site = Site(site_model, members, options, schedule, roster)
        self._ended: BaseException | str | None = None  # the reason why there are no more rounds
        self._stalled = 0.0  # seconds in step()
        self._started = time.perf_counter()
        registry.put(self, self.site)
        #: lets others not wait for one that is dropped; in a thread: it may be collected anywhere
        self._dropped = weakref.finalize(self, run_in_thread, members.close)
        self._dropped.atexit = False
        with self._ends_on_error():
            while self.site.rounds == NEW:
                self.site.begin()

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
                self.site.step()
        finally:
            self._stalled += time.perf_counter() - begin

    @without_inference_mode()
    def leave(self) -> None:
        """Take part in one more round (with TorchftMembers in two), which begins when the other
        sites come to theirs, hand the rest of what this site has not delivered to another one, and
        end.

        Raises ConfigError if sites do not change, and else as `step` does."""
        self._refuse_ended()
        if not self.site.members.changes:
            raise ConfigError("the ranks of a group cannot leave: all of them hipress.detach")
        with self._ends_on_error():
            self.site.leave()
            self.detach("it has left")

    def detach(self, why: str = "hipress is detached from it") -> None:
        """End connections; further steps raise SyncError."""
        self._ended = self._ended or why
        registry.drop(self)
        self._dropped.detach()
        self.site.part()
        self.site.members.close()

    def agreed(self) -> dict[str, torch.Tensor]:
        """Copies of the weights that sites agreed on last, by parameter, as float32 on the host, of
        FSDP2 this rank's shards; also when this has ended. `model.load_state_dict(outer.agreed(),
        strict=False)` puts them in a model that DDP does not wrap."""
        return by_parameter(self.site.fragments, lambda fragment: fragment.agreed.float())

    @property
    def rounds(self) -> int:
        """Rounds that all sites have ended."""
        return self.site.rounds

    @property
    def round(self) -> Round | None:
        """The round under way; None between two."""
        return self.site.round

    def report(self) -> OuterReport:
        """Counts and costs so far."""
        site = self.site
        return OuterReport(
            sites=len(site.roster.names),
            names=site.roster.names,
            ended=str(self._ended or ""),
            rounds=site.rounds,
            undone=site.undone,
            seconds=time.perf_counter() - self._started,
            stalled=self._stalled,
            sent_bytes=site.total_bytes,
            memory=site.memory(),
            schedule=f"{site.model.plan.label}, {site.schedule}",
        )

    def state_dict(self, *, portable: bool = False) -> dict[str, Any]:
        """This site's record: see `hipress.state_dict`."""
        return outer_state.export(self.site, portable=portable)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a record: see `hipress.load_state_dict`. strict is ignored."""
        outer_state.restore(self.site, state)

    @contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """End after an error, and let the other sites know."""
        try:
            yield
        except BaseException as error:
            self._ended = error
            registry.drop(self)
            self._dropped.detach()
            self.site.close_sites()
            self.site.members.fail(error)
            if self.site.members.changes:
                self.site.members.close()
            raise

    def _refuse_ended(self) -> None:
        if isinstance(self._ended, BaseException):
            raise SyncError(f"the outer loop has failed: {self._ended}") from self._ended
        if self._ended is not None:
            raise SyncError(f"the outer loop has ended: {self._ended}")


def _refuse_second(model: SiteModel, members: Members | None) -> None:
    """Raise ConfigError if another Outer averages some of this model, or has these members."""
    mine = {*model.module.parameters()}
    for _, other in registry.every(Site):
        same = "members" if other.members is members else ""
        if same or mine & {*other.model.module.parameters()}:
            raise ConfigError(
                f"another hipress.Outer has {'these members' if same else 'this model'}: "
                "hipress.detach it first, or train with it"
            )
