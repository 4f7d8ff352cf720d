"""The ranks that average together, as seen from one of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.codec import Codec
from casync.errors import fail_future
from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.runtime.counters import Counters
from casync.runtime.executor import TraceEvent
from casync.runtime.prepared import FLOATS
from casync.topology import Topology
from hipress.channel.channel import Channel
from hipress.channel.failures import Failures
from hipress.channel.futures import average
from hipress.choose.plan import hosted
from hipress.engine.host_staging import HostCopies
from hipress.engine.residuals import deferrable_states
from hipress.engine.verify import Verifier
from hipress.model.devices import ON_HOST, Placement, by_gloo
from hipress.options import Options
from hipress.ranks.groups import connect

#: seconds beyond a native all-reduce's own time-out; in torch 2.8 that is the group's
NATIVE_TIMEOUT_SLACK = 1.0


class Channels:
    """Connections among the ranks that average, and the channels on them.

    It knows no model, and ends with its ranks: other ranks need a new one. Gradients of a device
    take one of three ways: compressed and sent from where they are; copied to the host, and
    compressed there (`copies`); or, uncompressed and with a group of the host, summed there.
    """

    def __init__(
        self,
        codecs: Mapping[str, Codec],
        topology: Topology,
        options: Options,
        group: dist.ProcessGroup,
        failures: Failures,
        *,
        placement: Placement = ON_HOST,
        memory: Memory | None = None,
        unused: bool = False,
    ) -> None:
        """Connect. All ranks of the group must call this.

        Args:
            codecs: of all possible plans; one may be replaced before a plan uses it.
            group: of uncompressed buckets.
            memory: of gradients; by default the placement's.
            unused: True if averages of parameters that no rank used are dropped.
        """
        self.memory = memory or placement.memory()
        self.failures = failures
        self.coordinator = coordinator = failures.coordinator
        self.global_rank = coordinator.ranks[coordinator.rank]  # this rank's global number
        self._options, self._placement, self._group = options, placement, group
        self.always_copies = placement.copies  # True if each plan compresses copies on the host
        # gloo's futures do not order streams after its copies to a device
        self._native_copied = not placement.on_host and by_gloo(group)
        copies = placement.copies or self._native_copied or any(map(hosted, codecs))
        # a group for copies: calls from another thread must not mix with the first group's
        self._hosts = connect(coordinator, "copies") if copies else group
        verified = connect(coordinator, "verify") if options.verify else None
        self._channels = self._start(codecs, topology, unused=unused)
        self._copies = HostCopies(self.memory) if copies else None
        self.verifier: Verifier | None = None
        if verified is not None:
            self.verifier = Verifier(verified, coordinator.ranks, self.memory)

    def _start(
        self, codecs: Mapping[str, Codec], topology: Topology, *, unused: bool
    ) -> tuple[Channel, ...]:
        """The channel, or two if plans of a device may compress on the host."""
        placement, host = self._placement, HostMemory()
        memory = host if placement.on_host else self.memory
        deferred = {
            key: deferrable_states(codec, host if hosted(key) else memory)
            for key, codec in (codecs.items() if unused else ())
        }
        common = self._options, self.coordinator
        plans: dict[str, Any] = {"codecs": codecs, "deferred": deferred, "topology": topology}
        plans["failures"] = self.failures
        first = Channel("gradients", *common, placement=placement, memory=memory, **plans)
        if not any(map(hosted, codecs)):
            return (first,)
        try:
            return first, Channel("copies of gradients", *common, memory=host, **plans)
        except BaseException:
            first.close()
            raise

    def channel(self, *, hosted: bool) -> Channel:
        """The channel of gradients, or of a device's copies on the host."""
        return self._channels[-1] if hosted else self._channels[0]

    def sums_by_channel(self, values: torch.Tensor) -> bool:
        """True if a device's uncompressed values go over the channel's own transport, since the
        group is the host's."""
        dense = not values.is_sparse and values.dtype in FLOATS
        return self._native_copied and self._placement.by_nccl and dense

    def average_natively(
        self, number: int, values: torch.Tensor, *, copied: bool
    ) -> Future[torch.Tensor]:
        """Average bucket `number` in place like DDP without a hook. copied: it is a copy on the
        host."""
        if copied:
            return average(values, self._hosts, self._options.timeout)
        if self._native_copied and not values.is_sparse:
            return self.copies.average(number, self._average_copy, values)
        return average(values, self._group, self._options.timeout)

    def _average_copy(self, values: torch.Tensor) -> Future[torch.Tensor]:
        """Average a copy on the host; errors are the future's."""
        try:
            return average(values, self._hosts, self._options.timeout)
        except Exception as error:
            failed: Future[torch.Tensor] = Future()
            fail_future(failed, error)
            return failed

    @property
    def copies(self) -> HostCopies:
        """Copies of a device's buckets on the host, where they are averaged."""
        assert self._copies is not None  # there are buckets to copy
        return self._copies

    def free_copies(self) -> None:
        """Give back pinned memory of copies, which a plan that compresses on the host has left."""
        if self._copies is not None:
            self._copies.free()

    @property
    def counters(self) -> Counters:
        """A copy of the sums so far, over all channels."""
        return reduce(add, (each.counters for each in self._channels))

    @property
    def failed(self) -> bool:
        """True if a channel has failed."""
        return any(each.failed for each in self._channels)

    def trace(self, events: list[TraceEvent] | None) -> None:
        """Collect events of tasks from now on, between two steps; None ends it."""
        for each in self._channels:
            each.trace(events)

    def pop_capture_error(self) -> str:
        """Return and forget the reason why a capture failed; "" if none did."""
        return next(filter(None, [each.pop_capture_error() for each in self._channels]), "")

    def settle(self, job: Future[torch.Tensor] | None = None) -> None:
        """Wait until devices have done all submitted work, or that of one job; raise its errors."""
        for each in self._channels:
            each.settle(job)

    def close(self) -> None:
        """End threads and connections. May repeat."""
        for each in self._channels:
            each.close()
        if self._copies is not None:
            self._copies.close()
        if self.verifier is not None:
            self.verifier.close()
