"""Gossip: average parameters with neighbours, compressed, after the optimizer's step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from casync.codec import Codec
from casync.errors import PlanError
from casync.estimates import BEGIN, LAST, OWN, copy_of
from casync.runtime.deferral import as_torch
from casync.strategies.gossip import LINKS, grid
from hipress import compat, registry
from hipress import options as options_
from hipress.arguments import group_of
from hipress.channel.states import WORKER
from hipress.choose.plan import Plan
from hipress.engine.engine import Engine
from hipress.engine.order import buckets
from hipress.engine.residuals import Residuals
from hipress.errors import ConfigError, StateError, unknown
from hipress.model.params import COMPRESSIBLE, Param, describe, frozen_tensors, trainable
from hipress.model.shards import is_sharded
from hipress.model.torch_modes import without_inference_mode
from hipress.options import Options, refuse_foreign
from hipress.outer.schedule import OuterSGD, Schedule
from hipress.ranks import coordinator as coordinators
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import connect, group_timeout, share
from hipress.session import prepare, tell_plan
from hipress.ways.gossip_plan import gossip_plan, step_sizes
from hipress.ways.plain import broadcast_values, plain_module, refuse_detached, snapshot


class Mixing:
    """Averages parameters with estimates of neighbours. Holds no reference to the module.

    [Note: local steps of gossip] With x `begin` before the local steps and x after them, a round
    sends neighbours z, and moves from there (after GASLoC, Cagnasso et al. 2026)::

        y = begin + lr (x - begin)
        z = y + momentum (y - last);  last = y
        x = z + gamma sum over neighbours of w (x_hat_j - x_hat_i);  begin = x

    If all ranks are neighbours, and payloads exact, this is Nesterov's momentum on the average of
    changes, as DiLoCo has it. `begin` and `last` are kept only if lr is not 1 and momentum not 0.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: Sequence[nn.Parameter],
        neighbours: Sequence[int],
        gammas: Mapping[str, float],
        *,
        every: int = 1,
        lr: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        """parameters: equal on all ranks, as the caller has checked. gammas: by codec. every: local
        steps from round to round; lr, momentum: of rounds."""
        self._engine, self._parameters, self._gammas = engine, parameters, gammas
        self._every, self._lr, self._momentum = every, lr, momentum
        self._copies = tuple(map(copy_of, neighbours))
        self._buckets = buckets(engine.params, engine.plan, engine.options)
        for number, bucket in enumerate(self._buckets):
            for _, piece, states in self._pieces(number, bucket.gather(self._values(number))):
                for values in states.values():
                    values.copy_(piece)

    def run(self) -> None:
        """Count a step, and after every few exchange with neighbours, and move towards them."""
        engine = self._engine
        engine.refuse_broken()
        if (engine.step + 1) % self._every:
            engine.step += 1
            engine.traffic.steps += 1
            return
        with engine.failing("gossip.step()"):
            step, sent = engine.begin(), []
            for number, bucket in enumerate(self._buckets):
                sent.append(bucket.gather(self._values(number)))
                for _, piece, states in self._pieces(number, sent[-1]):
                    self._step_outer(piece, states)
                step.reduce(bucket.indices, sent[-1])
            step.finish(lambda number: self._mix(number, sent[number]))

    def _values(self, number: int) -> list[torch.Tensor]:
        return [self._parameters[index].detach() for index in self._buckets[number].indices]

    def _pieces(
        self, number: int, flat: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
        """Parameters of a bucket: index, values in the flat bucket, and states by name."""
        buckets, indices = self._engine.buckets, self._buckets[number].indices
        for index, piece in zip(indices, buckets.pieces(indices, flat), strict=True):
            arrays = buckets.residuals.arrays(index)[WORKER]
            yield index, piece, {name: as_torch(array) for name, array in arrays.items()}

    def _step_outer(self, piece: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Change parameters x to z: see [Note: local steps of gossip]."""
        if BEGIN in states:
            piece.copy_(torch.lerp(states[BEGIN], piece.float(), self._lr))
        if LAST in states:
            before = piece.float().clone()
            piece.add_(before - states[LAST], alpha=self._momentum)
            states[LAST].copy_(before)

    def _mix(self, number: int, flat: torch.Tensor) -> None:
        """Move a bucket's parameters, after all neighbours' payloads have come."""
        for index, piece, states in self._pieces(number, flat):
            piece.add_(self._correction(index, states))
            if BEGIN in states:
                states[BEGIN].copy_(piece)
        self._buckets[number].scatter(flat, self._values(number))

    def _correction(self, index: int, states: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """gamma (sum of w x_hat_j over neighbours j and oneself - x_hat), with equal weights w."""
        count, codec = len(self._copies), self._engine.plan.decisions[index].codec
        way = states[OWN] * -count
        for name in self._copies:
            way += states[name]
        return way.mul_(self._gammas[str(codec)] / (count + 1))


def check_copies(residuals: Residuals, coordinator: Coordinator) -> None:
    """Raise StateError, on all ranks, if a rank's copy of another's estimate is not what that rank
    has: after each loaded a state of its own."""
    digests: dict[str, hashlib._Hash] = {}
    for index in sorted(residuals.places):
        for name, array in residuals.arrays(index)[WORKER].items():
            digests.setdefault(name, hashlib.sha256()).update(array.tobytes())
    estimates_by_rank = coordinator.require_equal(
        {}, {name: hashed.hexdigest() for name, hashed in digests.items()}
    )
    for rank, estimates in enumerate(estimates_by_rank):
        for other, theirs in enumerate(estimates_by_rank):
            if estimates.get(copy_of(other), theirs.get(OWN)) != theirs.get(OWN):
                names = coordinator.ranks[rank], coordinator.ranks[other]
                raise StateError(
                    f"the states do not fit together: rank {names[0]}'s copy of rank {names[1]}'s "
                    f"parameters differs from the one that rank {names[1]} loaded; each rank must "
                    "load the state that it saved, all of the same step of one training"
                )


_REFUSED = {
    "verify": "ranks hold different parameters by design; hipress.consensus_distance says how far",
    "optimizer": "call gossip.step() after the optimizer's",
}


class Gossip:
    """Averages the parameters of a module with those of neighbours, compressed: CHOCO-SGD.

    ::

        gossip = hipress.Gossip(model, "int4_group", topology="ring")
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()  # each rank by its own gradient
        gossip.step()     # parameters move towards those of neighbours

    It replaces the averaging of gradients. A step sends each neighbour one payload, however many
    ranks there are. In return ranks hold different parameters, by design: their average is that of
    training with averaged gradients (for SGD without momentum, in the limit of small steps), and
    `hipress.consensus_distance` measures their distance from it.

    With neighbours j of rank i, weights w = 1 / (1 + neighbours), the same for all (Metropolis),
    codec Q, and estimates x_hat, of which neighbours hold copies, after the optimizer's step
    (Koloskova, Stich, Jaggi, ICML 2019, algorithm 2)::

        q_i = Q(x_i - x_hat_i);  x_hat_j += q_j, for i and its neighbours
        x_i += gamma sum over neighbours of w (x_hat_j - x_hat_i)

    With `every` ranks train alone for so many steps between two exchanges, and `outer` steps by
    what these changed: DiLoCo on any graph, after GASLoC (Cagnasso et al. 2026, arXiv 2606.11081).
    See [Note: local steps of gossip].

    Construction broadcasts parameters and buffers from rank 0; estimates begin as these parameters.
    They take the memory of 1 + neighbours models, in float32; an outer rate other than 1, and outer
    momentum, that of one more each.

    `hipress.state_dict`, `load_state_dict`, `report` and `detach` take it. Each rank saves its own
    model and its own state; to resume a training make it first, then load both.
    """

    @without_inference_mode()
    def __init__(
        self,
        model: nn.Module,
        compressor: str | os.PathLike[str] | Codec,
        *,
        topology: str = "ring",
        gamma: float | None = None,
        every: int = 1,
        outer: OuterSGD | None = None,
        exclude: str | Iterable[str] = (),
        min_size: SupportsIndex | None = None,
        seed: SupportsIndex = 0,
        timeout: float | timedelta | None = None,
        checksum: bool = False,
        rules: Mapping[str, Any] | str | os.PathLike[str] = MappingProxyType({}),
        process_group: dist.ProcessGroup | None = None,
        **params: Any,
    ) -> None:
        """Connect the ranks, broadcast parameters and buffers, and plan.

        Args:
            model: as for a Synchronizer; of float32, float16 or bfloat16.
            compressor: one whose decoded payload is closer to its input than zeros are, so not
                tern_group, for example; its own error feedback is not used.
            topology: the neighbours: "ring" (2 neighbours), "torus" (4; 3 in two rows; not for a
                prime number of ranks) or "complete" (all).
            gamma: in (0, 1], the share of the way to the average of estimates that parameters move;
                by default half of the share that the codec keeps of the square of normal noise
                (0.49 for int4_group, 0.043 for topk at 1%). A larger gamma gains nothing with
                int4_group and diverges with topk at 10%.
            every: steps, as counted by `step`, from one exchange with neighbours to the next.
            outer: with these local steps; by default OuterSGD(lr=1, momentum=0), which leaves the
                parameters as they are until they are averaged.

        Other options as for `wrap`. Raises ConfigError, ConfigMismatch, AgreementTimeout and
        RankLost as `wrap` does.
        """
        group = group_of(process_group)
        with coordinators.failures_told(group):
            refuse_foreign(
                "Gossip", params, "it averages parameters with neighbours, not gradients", _REFUSED
            )
            options = options_.make(
                compressor, exclude=exclude, min_size=min_size, seed=seed, checksum=checksum,
                timeout=group_timeout(group) if timeout is None else timeout, rules=rules,
                params=params,
            )  # fmt: skip
            schedule = Schedule(every, outer=OuterSGD(1.0, 0.0) if outer is None else outer)
            _check(options, gamma, schedule.outer)
            inner = plain_module(model, self)
            neighbours = _neighbours(topology, group)
            facts = {
                "called": "hipress.Gossip",
                "topology of gossip": topology,
                "gamma": str(gamma),
                "local steps of gossip": str(schedule),
                "frozen parameters and buffers": frozen_tensors(inner),
            }
        self.module = model
        adapt = partial(_adapt, links=topology, neighbours=neighbours, schedule=schedule)
        self._session = prepare(inner, options, group, facts, _parameters, adapt)
        named = dict(trainable(inner))
        parameters = [named[param.name] for param in self._session.params]
        self._snapshot = snapshot(self, self._session, inner, parameters)
        self._mixing: Mixing | None = None
        engine: Engine | None = None
        if self._session.world_size > 1:
            with self._session.coordinator.failures_told():
                self._mixing, engine = self._connect(inner, parameters, neighbours, gamma, schedule)
            self._session.loaded = partial(check_copies, coordinator=self._session.coordinator)
        self._session.start(self, engine, lambda: None)  # no hooks to remove
        registry.put(self, self._session)
        tell_plan(self._session)

    def _connect(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        neighbours: list[int],
        gamma: float | None,
        schedule: Schedule,
    ) -> tuple[Mixing, Engine]:
        session = self._session
        own = connect(session.coordinator, "steps")
        share(broadcast_values(model), own, session.coordinator)
        engine = session.make_engine(own, skips=True)
        mixing = Mixing(
            engine, parameters, neighbours, step_sizes(session.plan, gamma),
            every=schedule.every, lr=schedule.outer.lr, momentum=schedule.outer.momentum,
        )  # fmt: skip
        return mixing, engine

    @compat.untraced
    @without_inference_mode()
    def step(self) -> None:
        """Send the change of the parameters to neighbours, and move the parameters towards theirs;
        of `every` steps in the last only.

        Every rank must call it equally often, after each optimizer.step(). Raises the first
        failure, which names rank, peer and task (RankLost, AgreementTimeout or SyncError); after a
        failure every further step raises SyncError.
        """
        refuse_detached(self, self._session)
        with self._session.failing("gossip.step()"):
            self._snapshot.refuse_changes(compat.uncompiled(self.module))
        if self._mixing is not None:
            self._mixing.run()


def _adapt(plan: Plan, links: str, neighbours: list[int], schedule: Schedule) -> Plan:
    if not neighbours:
        return plan
    more = [BEGIN] * (schedule.outer.lr != 1) + [LAST] * bool(schedule.outer.momentum)
    rounds = f", {schedule}" if schedule.every > 1 or more else ""
    return gossip_plan(plan, links, neighbours, rounds, more)


def _neighbours(topology: object, group: dist.ProcessGroup) -> list[int]:
    """Neighbours of this rank; ConfigError for an unsuited topology."""
    if topology not in LINKS:
        raise unknown("topology of gossip", str(topology), LINKS)
    try:
        return [*grid(str(topology), group.size()).neighbours(group.rank())]
    except PlanError as error:
        raise ConfigError(f"topology={topology!r}: {error}") from error


def _check(options: Options, gamma: object, outer: OuterSGD) -> None:
    if options.automatic:
        raise ConfigError('Gossip needs a compressor by name: "auto" plans for gradients')
    if outer.momentum and not outer.nesterov:
        raise ConfigError("the outer momentum of Gossip is Nesterov's: leave nesterov=False out")
    if gamma is None:
        return
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 < gamma <= 1:
        raise ConfigError(f"gamma must be None or a number in (0, 1], got {gamma!r}")


def _parameters(model: nn.Module) -> tuple[Param, ...]:
    """The parameters to average: as dense, even if gradients are sparse. Raises ConfigError for
    other types and devices."""
    params = describe(model)
    for name, parameter in trainable(model):
        if is_sharded(parameter):
            raise ConfigError(f"parameter {name!r} is a DTensor; gossip averages whole parameters")
    for param in params:
        if param.device.type != "cpu":
            raise ConfigError(f"parameter {param.name!r} is on {param.device}; gossip is for CPUs")
        if param.dtype not in COMPRESSIBLE:
            kind = str(param.dtype).removeprefix("torch.")
            raise ConfigError(
                f"parameter {param.name!r} is of {kind}; gossip averages float32, float16 and "
                "bfloat16"
            )
    return tuple(replace(param, sparse=False) for param in params)
