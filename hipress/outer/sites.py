"""The sites of a round, as seen from one of them: connections, and states of codecs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.codec import State
from casync.raw import RAW
from casync.rounds import refuse_workers
from casync.runtime.counters import Counters
from hipress.channel.states import AGGREGATOR, WORKER, undelivered
from hipress.engine.exchange import Exchange, Piece
from hipress.errors import ConfigError
from hipress.options import Options
from hipress.outer.fragments import Bundle
from hipress.plan.plan import Plan
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.link import Agreement, gather

Arrays = dict[tuple[str, str], State]  # by codec and side, and name


class Sites:
    """Connections among the sites that average together; it ends when others do. With one site
    nothing travels."""

    def __init__(
        self,
        coordinator: Coordinator,
        plan: Plan,
        options: Options,
        *,
        calls: int = 0,
        changes: bool = False,
    ) -> None:
        """Connect; all sites must call this.

        calls: number of the first exchange, by which stochastic codecs draw; the same at all sites.
        changes: True if a round may be undone.
        """
        self.coordinator, self.changes, self._plan = coordinator, changes, plan
        self._exchange: Exchange | None = None
        self._norms: Agreement | None = None
        for codec in plan.codecs.values():
            if refusal := refuse_workers(codec, self.count):
                raise ConfigError(refusal)
        if self.count > 1:
            self._exchange = Exchange("outer", options, coordinator)
            weakref.finalize(self, self._exchange.close).atexit = False  # an Outer that is dropped
            self.calls = calls

    @property
    def count(self) -> int:
        """Number of sites."""
        return len(self.coordinator.ranks)

    @property
    def calls(self) -> int:
        """Number of the next exchange."""
        return 0 if self._exchange is None else self._exchange.calls

    @calls.setter
    def calls(self, number: int) -> None:
        if self._exchange is not None:
            self._exchange.calls = number

    @property
    def counters(self) -> Counters:
        """Sums so far."""
        return Counters(1) if self._exchange is None else self._exchange.executor.counters

    def submit(self, bundle: Bundle, values: torch.Tensor) -> Future[torch.Tensor] | None:
        """Start to average a bundle's values in place; None if there is no other site."""
        exchange = self._exchange
        if exchange is None or not values.numel():
            return None
        up, down = RAW, None
        if bundle.codec is not None:
            up = exchange.add(self._plan.codecs[bundle.codec])
            other = self._plan.downs.get(bundle.codec)
            down = None if other is None else exchange.add(self._plan.codecs[other])
        pieces = [Piece(length, up, down=down) for length in bundle.lengths if length]
        return exchange.submit(values, bundle.strategy, pieces, name=bundle.name, feedback=True)

    def median_norm(self, norm: float, counted: Sequence[int]) -> float:
        """The median of a number over the sites of these ranks; all sites must call this."""
        if self.count == 1:
            return norm
        if self._norms is None:
            self._norms = Agreement(self.coordinator, "outer norms")
        mine = torch.tensor([norm], dtype=torch.float64)

        def collect(group: dist.ProcessGroup) -> list[torch.Tensor]:
            return gather(mine, group)

        every = self._norms.run(collect, "comparing norms")
        return float(torch.quantile(torch.cat([every[rank] for rank in counted]), 0.5))

    def copy(self, bundles: Sequence[Bundle]) -> dict[str, Arrays]:
        """Copies of the states of bundles, for `put_back`."""
        return {bundle.name: _copied(self.states(bundle)) for bundle in bundles}

    def put_back(self, states: Mapping[str, Arrays]) -> None:
        """Restore copies. The arrays in use till now are dropped: a broken round's last task may
        still write into them."""
        if self._exchange is not None:
            for name, arrays in states.items():
                if arrays:
                    self._exchange.states[name] = arrays
                else:  # made in the round that is undone
                    self._exchange.states.pop(name, None)

    def undelivered(self, bundle: Bundle) -> torch.Tensor | None:
        """This site's part of a bundle that is not delivered, as a pseudo-gradient of its own, flat
        float32; None for nothing. See [Note: undelivered gradient] in engine/residuals.py."""
        if bundle.codec is None:
            return None
        states = {side: arrays for (_, side), arrays in self.states(bundle).items()}
        codecs = {
            WORKER: self._plan.codecs[bundle.codec],
            AGGREGATOR: self._plan.down(bundle.codec),
        }
        return undelivered(states, codecs, bundle.strategy, self.count)

    def states(self, bundle: Bundle) -> Arrays:
        """States of a bundle's codecs, in place."""
        return {} if self._exchange is None else self._exchange.states.get(bundle.name, {})

    def state_bytes(self, bundles: Sequence[Bundle]) -> int:
        """Bytes of the states of bundles, with the memory that owners have not touched."""
        return sum(bytes_of(self.states(bundle)) for bundle in bundles)

    def close(self) -> None:
        """End the connections; states stay. May repeat."""
        if self._exchange is not None:
            self._exchange.close()
        if self._norms is not None:
            self._norms.close()


def _copied(arrays: Arrays) -> Arrays:
    return {key: {name: a.copy() for name, a in each.items()} for key, each in arrays.items()}


def bytes_of(arrays: Arrays) -> int:
    """Bytes of states."""
    return sum(int(array.nbytes) for each in arrays.values() for array in each.values())
