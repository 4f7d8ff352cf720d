"""Where gradients are compressed, and by what payloads travel from there: what a probe measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from casync.memory import Event, Memory, Stream
from casync.memory.host import HostMemory
from casync.transports import SlotTransport, Transfer

__all__ = ["HERE", "Site", "Turn", "Wire"]

Received = Sequence[tuple[torch.Tensor, int]]  # what from whom


class Wire(Protocol):
    """Moves bytes between ranks; calls return when they have been moved."""

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Where the wire begins."""
        ...

    def swap(self, out: torch.Tensor, targets: Sequence[int], into: Received) -> None:
        """Send this to each of some ranks, and receive at the same time."""
        ...

    def reduce(self, data: torch.Tensor) -> None:
        """All-reduce."""
        ...


@dataclass(frozen=True)
class _ByGroup:
    group: dist.ProcessGroup

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

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
        received = [Transfer("recv", (source,), data, name) for data, source in into]
        self._exchange([*received, *(Transfer("send", (to,), out, name) for to in targets)])

    def reduce(self, data: torch.Tensor) -> None:
        ranks = tuple(range(self.transport.world_size))
        self._exchange([Transfer("reduce", ranks, data, "an all-reduce of the probe")])

    def _exchange(self, transfers: Sequence[Transfer]) -> None:
        turn = Turn(self.memory.caller(), self.memory.event())
        turn.take(lambda: self.transport.exchange(transfers))


@dataclass(frozen=True)
class Turn:
    """A stream for whose work the host waits."""

    stream: Stream
    done: Event

    @classmethod
    def of(cls, memory: Memory) -> Turn:
        """On a new stream."""
        return cls(memory.stream(), memory.event())

    def take(self, work: Callable[[], object], count: int = 1) -> None:
        """So many times."""
        for _ in range(count):
            self.stream.run(work)
        self.stream.record(self.done)
        self.done.wait()


@dataclass(frozen=True)
class Site:
    """Where gradients are computed and compressed. `slots`: by what payloads travel; None: gloo."""

    memory: Memory  # in which codecs work
    backward: Memory  # in which the backward pass does
    slots: SlotTransport | None = None

    def wire(self, group: dist.ProcessGroup) -> Wire:
        """Between the ranks of a gloo group, which take this way."""
        return _ByGroup(group) if self.slots is None else _BySlots(self.slots, self.memory)

    @property
    def copies(self) -> bool:
        """Whether anything is copied between a device and the host on its way."""
        return self.slots is None and not self.backward.host

    def abort(self) -> None:
        """Disconnect, whatever is under way: nobody waits for a peer that is gone."""
        if self.slots is not None:
            self.slots.abort()

    def close(self) -> None:
        """Disconnect when what is under way is done."""
        if self.slots is not None:
            self.slots.close()


HERE = Site(HostMemory(), HostMemory())
