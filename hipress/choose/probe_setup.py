"""Memories of gradients and codecs, and the wire for payloads, as probes measure them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from casync.memory import Event, Memory, Stream
from casync.memory.host import HostMemory
from casync.transports import Member, SlotTransport

__all__ = ["HOST", "ProbeSetup", "TimedStream", "Wire"]

Received = Sequence[tuple[torch.Tensor, int]]  # buffers, and the ranks that they come from


class Wire(Protocol):
    """A link between ranks; calls return when the bytes have been moved."""

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in the memory from which the wire sends."""
        ...

    def swap(self, out: torch.Tensor, targets: Sequence[int], into: Received) -> None:
        """Send `out` to each target, and receive at the same time."""
        ...

    def reduce(self, data: torch.Tensor) -> None:
        """All-reduce `data` in place."""
        ...


@dataclass(frozen=True)
class _ByGroup:
    group: dist.ProcessGroup

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device="cpu")

    def swap(self, out: torch.Tensor, targets: Sequence[int], into: Received) -> None:
        works = [self.group.recv([data], source, 0) for data, source in into]
        works += [self.group.send([out], target, 0) for target in targets]
        for work in works:
            work.wait()

    def reduce(self, data: torch.Tensor) -> None:
        self.group.allreduce([data], dist.AllreduceOptions()).wait()


@dataclass(frozen=True)
class _BySlots:
    transport: SlotTransport
    memory: Memory

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.zeros(count, dtype)

    def swap(self, out: torch.Tensor, targets: Sequence[int], into: Received) -> None:
        name = "a message of the probe"
        received = [Member("recv", (source,), data, name) for data, source in into]
        self._exchange([*received, *(Member("send", (to,), out, name) for to in targets)])

    def reduce(self, data: torch.Tensor) -> None:
        ranks = tuple(range(self.transport.world_size))
        self._exchange([Member("reduce", ranks, data, "an all-reduce of the probe")])

    def _exchange(self, transfers: Sequence[Member]) -> None:
        stream = TimedStream(self.memory.caller(), self.memory.event())
        stream.run(lambda: self.transport.exchange(transfers))


@dataclass(frozen=True)
class TimedStream:
    """A stream for whose work the host waits."""

    stream: Stream
    done: Event

    @classmethod
    def of(cls, memory: Memory) -> TimedStream:
        """A new stream."""
        return cls(memory.stream(), memory.event())

    def run(self, work: Callable[[], object], count: int = 1) -> None:
        """Run the work `count` times, and wait for it."""
        for _ in range(count):
            self.stream.run(work)
        self.stream.record(self.done)
        self.done.wait()


@dataclass(frozen=True)
class ProbeSetup:
    """Memories of the backward pass and of codecs. `slots`: transport of payloads; None: gloo."""

    memory: Memory  # memory of codecs
    backward: Memory  # memory of the backward pass
    slots: SlotTransport | None = None

    def wire(self, group: dist.ProcessGroup) -> Wire:
        """The wire of this setup between the ranks of a gloo group."""
        return _ByGroup(group) if self.slots is None else _BySlots(self.slots, self.memory)

    @property
    def copies(self) -> bool:
        """True if gradients or payloads are copied between a device and the host."""
        return self.slots is None and not self.backward.host

    def abort(self) -> None:
        """Disconnect at once: nobody waits for a peer that is gone."""
        if self.slots is not None:
            self.slots.abort()

    def close(self) -> None:
        """Disconnect after current operations are done."""
        if self.slots is not None:
            self.slots.close()


HOST = ProbeSetup(HostMemory(), HostMemory())
