"""The compressed collectives of a model, between `hipress.shard` and `hipress.detach`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from casync.raw import RAW
from hipress import compat
from hipress.engine.carried import Carried
from hipress.engine.exchange import Exchange
from hipress.engine.failures import Failures
from hipress.engine.residuals import in_layout, in_shape
from hipress.errors import StateError
from hipress.model.devices import Placement
from hipress.model.params import Param
from hipress.options import Options
from hipress.ranks import job
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.link import Mean
from hipress.sharding import states
from hipress.sharding.comms import Average, Backward, Gather, Link, Scatter, Traffic
from hipress.sharding.fsdp import Group
from hipress.sharding.shard_report import ShardReport
from hipress.sharding.states import Row
from hipress.sharding.ways import ALL_GATHER, REDUCE_SCATTER, REPLICAS, Way
from hipress.state.checkpoint_compat import check_owed
from hipress.state.checkpoint_format import check_format, portable_state
from hipress.state.portable import without_sums

__all__ = ["SHARDINGS", "Sharding", "sharding_of"]

FORMAT = 1
#: by argument of `shard`
COMMS = {REDUCE_SCATTER: Scatter, ALL_GATHER: Gather, REPLICAS: Average}
SHARDINGS: weakref.WeakKeyDictionary[nn.Module, Sharding] = weakref.WeakKeyDictionary()


class Sharding:
    """The compressed collectives of a model. It does not refer to the model."""

    def __init__(
        self,
        coordinator: Coordinator,
        options: Options,
        params: Sequence[Param],
        ways: Mapping[str, Way],
        buffers: int,
    ) -> None:
        """ways: by argument of `shard`; native ones are left out."""
        self.coordinator, self.options, self.ways = coordinator, options, ways
        self.backward = Backward(buffers)
        self.links: dict[str, Link] = {}  # by argument; empty with one rank
        self._params, self._rows = params, list[Row]()
        self._buffers, self._sent = buffers, Traffic()
        self._carried = Carried({}, (), ())  # what a loaded state had not delivered
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()

    def connect(
        self, purpose: str, ranks: Coordinator, arguments: Iterable[str], placement: Placement
    ) -> None:
        """Connect these ranks, which make the collectives of some arguments."""
        replaced = [each for each in arguments if each in self.ways]
        if replaced:
            options = self.options
            if ranks is not self.coordinator:
                options = replace(options, topology=None)  # which is of the ranks of the shards
            exchange = Exchange(
                purpose, options, ranks, placement=placement, memory=placement.memory()
            )
            failures = Failures(ranks, self.options.timeout)
            self.links |= dict.fromkeys(replaced, Link(ranks, exchange, failures, self.backward))
            job.watch()

    def install(self, groups: Sequence[Group]) -> None:
        """Take the place of FSDP's collectives where something is compressed."""
        start = 0
        for number, group in enumerate(groups):
            mine = slice(start, start + len(group.lengths))
            start = mine.stop
            names = [each.name for each in self._params[mine]]
            comms: dict[str, Any] = {}
            for argument, link in self.links.items():
                way = self.ways[argument]
                keys = [RAW if c is None else link.exchange.add(c) for c in way.codecs[mine]]
                if any(key != RAW for key in keys):
                    common = group, keys, link, number, len(groups), self._sent
                    comms[argument] = comm = COMMS[argument](*common, way.strategy)
                    if argument == REPLICAS:
                        sizes = way.codecs[mine], group.lengths, group.starts
                        row = Row(link.exchange, way.strategy, comm.name, names, keys, *sizes)
                        self._rows.append(row)
            if comms:
                group.install(
                    comms.get(ALL_GATHER), comms.get(REDUCE_SCATTER), comms.get(REPLICAS),
                    self.backward.begin, self._buffers,
                )  # fmt: skip
                self._groups.add(group)

    @property
    def passes(self) -> int:
        """Backward passes so far that sent gradients."""
        return self.backward.count

    def report(self) -> ShardReport:
        """Choices, bytes and times so far."""
        links = {*self.links.values()}
        each = [link.exchange.executor.counters for link in links]
        decisions = {name: way.decisions for name, way in self.ways.items()}
        return ShardReport(
            rank=self.coordinator.rank,
            world_size=len(self.coordinator.ranks),
            installed=bool(links),
            passes=self.passes,
            decisions=decisions,
            native_bytes=self._sent.native,
            bytes_sent=round(sum(one.wire_bytes for one in each)),
            state_bytes=sum(link.state_bytes for link in links),
            encode_seconds=sum(one.encode_seconds for one in each),
            decode_seconds=sum(one.decode_seconds for one in each),
            wait_seconds=sum(link.waited for link in links),
        )

    def state_dict(self, params: Sequence[Param]) -> dict[str, Any]:
        """The number by which stochastic codecs draw, and this rank's residuals of averages between
        replicas, by parameter. params: this rank's shards."""
        self._refuse_failed()
        saved = states.export(self._rows)
        owed = {param.name: self._owed_to(param).clone() for param in params}
        owed = {name: values for name, values in owed.items() if values.any()}
        common = {"format": FORMAT, "passes": self.passes, "place": self._place}
        return {**common, "owed": owed, **saved}

    def portable_state_dict(self, params: Sequence[Param]) -> dict[str, Any]:
        """The same for any number of replicas: what these have not delivered is a gradient, of this
        rank's shards. All ranks must call this."""
        self._refuse_failed()
        owed, residuals = {}, states.undelivered_by_name(self._rows)
        for param in params:
            values = self._owed_to(param)
            if param.name in residuals:  # on all replicas
                mine = residuals[param.name][: param.numel].view(param.shape)
                values = self._mean(values + mine)
            owed[param.name] = values
        return portable_state(self.passes, owed=owed)

    def load_state_dict(
        self, state: Mapping[str, Any], params: Sequence[Param], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Go on from a state of `state_dict`, bit for bit, or a portable one, which is added to the
        next gradients. params, parameters: this rank's shards. Raises StateError for any other."""
        self._refuse_failed()
        portable = state.get("portable", False)
        with self.coordinator.failures_told():
            if portable:
                check_format(state)
                state = without_sums(state)
            else:
                self._check_own(state)
            good, wrong = check_owed(params, state)
            if wrong:
                raise StateError("the state does not fit this model:\n  " + "\n  ".join(wrong))
            if portable:
                states.clear(self._rows)
            else:
                states.restore(self._rows, state)
        passes = state["step" if portable else "passes"]
        self.coordinator.require_equal({"backward passes of the state to load": passes})
        self.backward.count = passes
        self._carried.close()
        owed = {param.index: in_layout(state["owed"][param.name], param) for param in good}
        self._carried = Carried(owed, params, parameters)

    def _check_own(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != FORMAT or "passes" not in state:
            raise StateError(
                "this is no state of a model of hipress.shard: pass hipress.state_dict(model) of "
                "one, or a portable state"
            )
        if state["state"] and state["place"] != self._place:
            raise StateError(
                f"the state is that of rank and ranks {state['place']}, and this is {self._place}: "
                "load on each rank the file that it saved, with as many ranks, or save with "
                "portable=True"
            )

    def _owed_to(self, param: Param) -> torch.Tensor:
        """A parameter's part of a loaded state that was not added to its gradient yet."""
        values = self._carried.owed.get(param.index)
        return torch.zeros(param.shape) if values is None else in_shape(values, param)

    @functools.cached_property
    def _mean(self) -> Mean:
        """Takes means of states over the replicas."""
        return Mean(self.links[REPLICAS].ranks)

    @property
    def _place(self) -> list[int]:
        """Rank and ranks of the shards, and of the replicas."""
        ranks = [
            self.coordinator,
            *(link.ranks for name, link in self.links.items() if name == REPLICAS),
        ]
        return [number for each in ranks for number in (each.rank, len(each.ranks))]

    def detach(self) -> None:
        """Give FSDP its own collectives back, and end threads and connections."""
        for group in self._groups:
            group.restore()
        self.close()
        for model in [model for model, each in SHARDINGS.items() if each is self]:
            del SHARDINGS[model]

    def close(self) -> None:
        """End threads and connections. May repeat."""
        self._carried.close()
        for link in self.links.values():
            link.exchange.close()

    def _refuse_failed(self) -> None:
        for link in self.links.values():
            if link.failures.first is not None:
                raise StateError(f"rank {self.coordinator.rank}: {link.failures.first}")


def sharding_of(model: object) -> Sharding | None:
    """The collectives of a model of `hipress.shard`; None for any other object."""
    if not isinstance(model, nn.Module) or not SHARDINGS:
        return None
    return SHARDINGS.get(compat.uncompiled(model))
