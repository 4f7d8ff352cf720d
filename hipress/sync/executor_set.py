"""Routes of compressed buckets: the executor on the device or the host, by the plan's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch
from torch.futures import Future

from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.runtime.counters import Counters
from casync.runtime.executor import Executor, TraceEvent
from hipress.coordination.coordinator import Coordinator
from hipress.devices import ON_HOST, Placement
from hipress.options import Options
from hipress.plan.plan import Plan, hosted
from hipress.sync.executors import start_executor
from hipress.sync.state import deferrable_states

if TYPE_CHECKING:
    from casync.codec import Codec

__all__ = ["Route", "Routes"]


@dataclass(frozen=True)
class Route:
    """An executor, and the memory of its payloads and states."""

    memory: Memory
    executor: Executor


@dataclass(frozen=True)
class Routes:
    """All routes of a module: one, or two if plans of a device may compress on the host."""

    every: tuple[Route, ...]

    @classmethod
    def start(
        cls,
        codecs: Mapping[str, Codec],
        options: Options,
        coordinator: Coordinator,
        placement: Placement,
        gradients: Memory,
        *,
        unused: bool,
    ) -> Routes:
        """Start the executors. All ranks of the group must call this.

        codecs: of all possible plans; one may be replaced before a plan uses it.
        gradients: memory of the gradients.
        unused: True if averages of parameters that no rank used are dropped.
        """
        memory = HostMemory() if placement.on_host else gradients
        deferred = {
            key: deferrable_states(codec, HostMemory() if hosted(key) else memory)
            for key, codec in (codecs.items() if unused else ())
        }
        first = start_executor(
            "gradients", codecs, options, coordinator, deferred, placement, memory
        )
        if not any(map(hosted, codecs)):
            return cls((Route(memory, first),))
        try:
            host = start_executor(
                "copies of gradients", codecs, options, coordinator, deferred, ON_HOST
            )
        except BaseException:
            first.close()
            raise
        return cls((Route(memory, first), Route(HostMemory(), host)))

    def of(self, plan: Plan) -> Route:
        """The route of this plan's buckets."""
        return self.every[plan.hosted]

    @property
    def counters(self) -> Counters:
        """Sums so far, over all executors."""
        return reduce(add, (each.executor.counters for each in self.every))

    @property
    def failed(self) -> bool:
        """True if an executor has failed."""
        return any(each.executor.failed for each in self.every)

    def abort(self, error: Exception) -> None:
        """End all executors."""
        for each in self.every:
            each.executor.abort(error)

    def trace(self, events: list[TraceEvent] | None) -> None:
        """Collect events of tasks from now on; None ends it."""
        for each in self.every:
            each.executor.trace = events

    def settle(self, future: Future[torch.Tensor] | None = None) -> None:
        """Settle all executors: see Executor.settle."""
        for each in self.every:
            each.executor.settle(future)

    def close(self) -> None:
        """Close all executors."""
        for each in self.every:
            each.executor.close()
