"""The sites of a round, as seen from one of them: connections, and states of codecs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.memory.host import HostMemory
from casync.raw import RAW
from casync.rounds import refuse_workers
from casync.runtime.counters import Counters
from hipress.channel.channel import Channel
from hipress.channel.exchange import Exchange, Piece
from hipress.channel.failures import Failures
from hipress.channel.states import Arena, Floats, States
from hipress.choose.plan import Plan
from hipress.errors import ConfigError
from hipress.options import Options
from hipress.outer.fragments import Bundle
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import Agreement, gather

Copies = list[tuple[Arena, dict[str, dict[str, Floats]]]]  # of states, by side and name


class Sites:
    """Connections among the sites that average together; it ends when others do. With one site
    nothing travels."""

    def __init__(
        self,
        coordinator: Coordinator,
        plan: Plan,
        options: Options,
        bundles: Sequence[Bundle],
        *,
        calls: int = 0,
        changes: bool = False,
    ) -> None:
        """Connect; all sites must call this.

        bundles: of all fragments. calls: number of the first exchange, by which stochastic codecs
        draw; the same at all sites. changes: True if a round may be undone.
        """
        self.coordinator, self.changes, self._plan = coordinator, changes, plan
        self.calls = calls  # number of the next exchange
        self.failures = Failures(coordinator, options.timeout, "outer round")
        self._channel: Channel | None = None
        self._exchanges: dict[str, Exchange] = {}  # by name of a bundle
        self._norms: Agreement | None = None
        for codec in plan.codecs.values():
            if refusal := refuse_workers(codec, self.count):
                raise ConfigError(refusal)
        if self.count > 1:
            self._channel = channel = Channel("outer", options, coordinator, failures=self.failures)
            self._exchanges = {each.name: self._exchange(channel, each) for each in bundles}

    @property
    def count(self) -> int:
        """Number of sites."""
        return len(self.coordinator.ranks)

    @property
    def counters(self) -> Counters:
        """Sums so far."""
        return Counters(1) if self._channel is None else self._channel.counters

    @property
    def states(self) -> States[str]:
        """States of codecs, by parameter."""
        return States(1, HostMemory()) if self._channel is None else self._channel.states

    def _exchange(self, channel: Channel, bundle: Bundle) -> Exchange:
        """The exchange of a bundle, with the states of its codecs."""
        up, down = RAW, None
        if bundle.codec is not None:
            up = channel.add(self._plan.codecs[bundle.codec])
            other = self._plan.downs.get(bundle.codec)
            down = None if other is None else channel.add(self._plan.codecs[other])
        pieces = tuple(
            Piece(param.numel, up, bundle.strategy, down, name=param.name)
            for param in bundle.params
            if param.numel
        )
        return channel.with_states(Exchange(bundle.name, pieces))

    def submit(self, bundle: Bundle, values: torch.Tensor) -> Future[torch.Tensor] | None:
        """Start to average a bundle's values in place; None if there is no other site."""
        if self._channel is None or not values.numel():
            return None
        self.calls += 1
        return self._channel.submit(values, self._exchanges[bundle.name], draw=self.calls - 1)

    def wait(self, future: Future[torch.Tensor], round_: int) -> None:
        """Wait for an average, as Channel.wait does. round_: number of the round, for errors."""
        assert self._channel is not None
        self._channel.wait(future, round_)

    def median_norm(self, norm: float, counted: Sequence[int]) -> float:
        """The median of a number over the sites of these ranks; all sites must call this."""
        if self.count == 1:
            return norm
        if self._norms is None:
            self._norms = Agreement(self.coordinator, "outer norms")
        mine = torch.tensor([norm], dtype=torch.float64, device="cpu")

        def collect(group: dist.ProcessGroup) -> list[torch.Tensor]:
            return gather(mine, group)

        every = self._norms.run(collect, "comparing norms")
        return float(torch.quantile(torch.cat([every[rank] for rank in counted]), 0.5))

    def copy(self, bundles: Sequence[Bundle]) -> Copies:
        """Copies of the states of bundles, for `put_back`."""
        names = {param.name for bundle in bundles for param in bundle.params}
        arenas = {self.states.places[name].arena for name in names & self.states.places.keys()}
        return [(arena, arena.copy()) for arena in arenas]

    def put_back(self, copies: Copies) -> None:
        """Restore copies: see Arena.take."""
        for arena, copied in copies:
            arena.take(copied)

    def undelivered(self, bundle: Bundle) -> torch.Tensor | None:
        """This site's part of a bundle that is not delivered, as a pseudo-gradient of its own, flat
        float32; None for nothing. See [Note: undelivered gradient] in channel/states.py."""
        pieces = [self.states.undelivered(param.name) for param in bundle.params if param.numel]
        some = [piece for piece in pieces if piece is not None]
        return torch.cat(some) if some else None  # all or none: they have one codec

    def close(self) -> None:
        """End the connections; states stay. May repeat."""
        if self._channel is not None:
            self._channel.close()
        if self._norms is not None:
            self._norms.close()


def bytes_of(copies: Copies) -> int:
    """Bytes of copies of states."""
    return sum(arena.nbytes for arena, _ in copies)
