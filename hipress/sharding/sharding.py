"""The compressed collectives of a model, between `hipress.shard` and `hipress.detach`."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from casync.memory.host import HostMemory
from casync.raw import RAW
from hipress.channel.channel import Channel
from hipress.channel.records import (
    GRADIENTS,
    SHARDS,
    check_place,
    check_record,
    check_states,
    check_undelivered,
    entries_of,
    export_states,
    make_record,
    refuse,
)
from hipress.channel.states import States
from hipress.choose.plan import raw
from hipress.engine.loaded import LoadedGradients
from hipress.engine.residuals import in_layout, in_shape
from hipress.engine.saving import without_sums
from hipress.errors import StateError
from hipress.model.devices import Placement
from hipress.model.params import Param
from hipress.options import Options
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import Mean
from hipress.reporting.shard_report import ShardReport
from hipress.sharding.collectives import ALL_GATHER, REDUCE_SCATTER, REPLICAS, Collective
from hipress.sharding.comms import Backward, Connection, Gather, ReplicaAverage, Scatter
from hipress.sharding.fsdp import Group, count_steps

__all__ = ["Sharding"]

log = logging.getLogger("hipress")
#: by argument of `shard`
COMMS = {REDUCE_SCATTER: Scatter, ALL_GATHER: Gather, REPLICAS: ReplicaAverage}


class Sharding:
    """The compressed collectives of a model. It does not refer to the model."""

    def __init__(
        self,
        coordinator: Coordinator,
        options: Options,
        params: Sequence[Param],
        collectives: Mapping[str, Collective],
        buffers: int,
    ) -> None:
        """collectives: by argument of `shard`; native ones are left out."""
        self.coordinator, self.options, self.collectives = coordinator, options, collectives
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self.backward = Backward(buffers, self._groups)
        self.connections: dict[str, Connection] = {}  # by argument; empty with one rank
        self._params, self._buffers = params, buffers
        self._loaded = LoadedGradients({}, (), ())  # what a loaded state had not delivered
        self._told: set[tuple[str, str]] = set()  # arguments, and why they are left to FSDP
        count_steps()

    def connect(
        self,
        purpose: str,
        ranks: Coordinator,
        group: dist.ProcessGroup,
        arguments: Iterable[str],
        placement: Placement,
    ) -> None:
        """Connect these ranks of a group, which make the collectives of some arguments."""
        replaced = [each for each in arguments if each in self.collectives]
        if replaced:
            options = self.options
            if ranks is not self.coordinator:
                options = replace(options, topology=None)  # which is of the ranks of the shards
            channel = Channel(purpose, options, ranks, placement=placement)
            connection = Connection(channel, group, self.backward)
            self.connections |= dict.fromkeys(replaced, connection)

    def install(self, groups: Sequence[Group]) -> None:
        """Take the place of FSDP's collectives. Those that codecs do not take are left to it, and
        counted."""
        start = 0
        for number, group in enumerate(groups):
            mine = slice(start, start + len(group.lengths))
            start = mine.stop
            comms: dict[str, Any] = {}
            for argument, connection in self.connections.items():
                collective = self.collectives[argument]
                keys = [
                    RAW if c is None else connection.channel.add(c) for c in collective.codecs[mine]
                ]
                leave = functools.partial(self._leave, argument, mine)
                names = [each.name for each in self._params[mine]]
                common = (
                    group,
                    names,
                    keys,
                    connection,
                    number,
                    len(groups),
                    collective.strategy,
                    leave,
                )
                comms[argument] = comm = COMMS[argument](*common)
                comm.takes(group.gathered if argument == ALL_GATHER else group.reduced)
            if comms:
                group.install(
                    comms.get(ALL_GATHER), comms.get(REDUCE_SCATTER), comms.get(REPLICAS),
                    self.backward.begin, self.backward.drop, self._buffers,
                )  # fmt: skip
                self._groups.add(group)

    def _leave(self, argument: str, mine: slice, why: str) -> None:
        """Note that parameters travel uncompressed, and tell of the first ones."""
        collective, params = self.collectives[argument], self._params[mine]
        decisions = list(collective.decisions)
        decisions[mine] = [raw(param, why) for param in params]
        self.collectives = {
            **self.collectives,
            argument: replace(collective, decisions=tuple(decisions)),
        }
        if self.coordinator.rank == 0 and (argument, why) not in self._told:
            first = params[0].name
            log.warning("hipress.shard: %s of %r travels uncompressed: %s", argument, first, why)
        self._told.add((argument, why))

    @property
    def passes(self) -> int:
        """Backward passes so far that sent gradients, also before a state was loaded."""
        return self.backward.passes

    def report(self) -> ShardReport:
        """Choices, bytes and times so far."""
        channels = {connection.channel for connection in self.connections.values()}
        each = [channel.counters for channel in channels]
        decisions = {name: each.decisions for name, each in self.collectives.items()}
        traffic = self.backward.traffic
        return ShardReport(
            rank=self.coordinator.rank,
            world_size=len(self.coordinator.ranks),
            installed=bool(channels),
            steps=traffic.steps,
            passes=traffic.passes,
            decisions=decisions,
            native_bytes=traffic.native,
            left_bytes=traffic.left,
            bytes_sent=round(sum(one.wire_bytes for one in each)),
            state_bytes=sum(channel.states.nbytes for channel in channels),
            encode_seconds=sum(one.encode_seconds for one in each),
            decode_seconds=sum(one.decode_seconds for one in each),
            wait_seconds=sum(channel.waited for channel in channels),
        )

    def state_dict(self, params: Sequence[Param]) -> dict[str, Any]:
        """The numbers by which stochastic codecs draw, and this rank's residuals of averages
        between replicas, by parameter. params: this rank's shards."""
        self._refuse_unfinished()
        undelivered = {param.name: self._undelivered(param).clone() for param in params}
        draws = {"gradients": self.backward.sums, "weights": self._versions}
        return make_record(
            SHARDS,
            self.passes,
            place=self._place,
            **export_states(self._states),
            undelivered={name: each for name, each in undelivered.items() if each.any()},
            more={"draws": draws},
        )

    @property
    def _states(self) -> States[str]:
        """States of codecs between replicas, by parameter; none without replicas."""
        connection = self.connections.get(REPLICAS)
        return States(1, HostMemory()) if connection is None else connection.channel.states

    @property
    def _versions(self) -> dict[str, int]:
        """Numbers of the present weights, by group."""
        return {group.name: group.version() for group in self._groups}

    def portable_state_dict(self, params: Sequence[Param]) -> dict[str, Any]:
        """The same for any number of replicas: what these have not delivered is a gradient, of this
        rank's shards. All ranks must call this."""
        self._refuse_unfinished()
        undelivered = {}
        for param in params:
            values, residual = self._undelivered(param), self._states.undelivered(param.name)
            if residual is not None:  # on all replicas
                mine = residual[: param.numel].view(param.shape).cpu()
                values = self._mean(values + mine)
            undelivered[param.name] = values
        return make_record(GRADIENTS, self.passes, portable=True, undelivered=undelivered)

    def load_state_dict(
        self, state: Mapping[str, Any], params: Sequence[Param], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Go on from a state of `state_dict`, bit for bit, or a portable one, which is added to the
        next gradients. params, parameters: this rank's shards. Raises StateError for any other."""
        self._refuse_failed()
        with self.coordinator.failures_told():
            check_record(state, SHARDS, GRADIENTS)
            wrong, portable = [], state["portable"]
            if portable:
                state = {**without_sums(state), "states": {}}
            elif state["of"] == GRADIENTS:
                wrong.append("it is not of hipress.shard: save that one with portable=True")
            else:
                wrong += check_place(state, self._place)
                names = {param.name: "no compressor with states" for param in params}
                wrong += check_states(state, entries_of(self._states), names)[1]
            good, problems = check_undelivered(state, {each.name: each.shape for each in params})
            refuse([*wrong, *problems], " this model")
        passes = state["counter"]
        self.coordinator.require_equal({"backward passes of the state to load": passes})
        self._states.restore(state["states"])
        self.backward.drop()
        draws = state["more"].get("draws", {"gradients": passes, "weights": {}})
        self.backward.passes, self.backward.sums = passes, draws["gradients"]
        for group in self._groups:
            group.go_on(draws["weights"].get(group.name, passes))
            group.held.clear()
        self._loaded.close()
        undelivered = {
            param.index: in_layout(state["undelivered"][param.name], param)
            for param in params
            if param.name in good
        }
        self._loaded = LoadedGradients(undelivered, params, parameters)

    def _undelivered(self, param: Param) -> torch.Tensor:
        """A parameter's part of a loaded state that was not added to its gradient yet."""
        values = self._loaded.undelivered.get(param.index)
        return torch.zeros(param.shape, device="cpu") if values is None else in_shape(values, param)

    @functools.cached_property
    def _mean(self) -> Mean:
        """Takes means of states over the replicas."""
        return Mean(self.connections[REPLICAS].channel.coordinator)

    @property
    def _place(self) -> list[int]:
        """Rank and ranks of the shards, and of the replicas."""
        ranks = [self.coordinator]
        if REPLICAS in self.connections:
            ranks.append(self.connections[REPLICAS].channel.coordinator)
        return [number for each in ranks for number in (each.rank, len(each.ranks))]

    def detach(self) -> None:
        """Give FSDP its own collectives back, and end threads and connections."""
        for group in self._groups:
            group.restore()
        self.close()

    def close(self) -> None:
        """End threads and connections. May repeat."""
        self._loaded.close()
        for connection in self.connections.values():
            connection.channel.close()

    def _refuse_unfinished(self) -> None:
        self._refuse_failed()
        for group in self._groups:
            if group.held:
                raise StateError(
                    f"rank {self.coordinator.rank}: gradients of {group.name!r} wait for their "
                    "average over replicas, by set_requires_all_reduce(False), and no state has "
                    "them: save between two steps, or drop them by model.reset_iter_state()"
                )

    def _refuse_failed(self) -> None:
        for connection in self.connections.values():
            if (failure := connection.channel.failures.first) is not None:
                raise StateError(f"rank {self.coordinator.rank}: {failure}")
