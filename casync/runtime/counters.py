"""Counters of an executor."""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from casync.building.tasks import Decode, Encode, Follow, Merge, Recv, Reduce, Send
from casync.runtime.lanes import Job

__all__ = ["Counters"]

_OTHERS = ("world_size", "bytes_unused")  # fields that are no sums


@dataclass
class Counters:
    """Sums since the executor was made; differences of two copies describe a step."""

    world_size: int
    jobs: int = 0
    bytes_sent: int = 0  # payload bytes of point-to-point messages
    bytes_spared: int = 0  # of bytes_sent, repeats that do not travel; see repeat_elision.py
    #: by codec: of bytes_sent, unused capacity, see [Note: lengths that vary]
    bytes_unused: Mapping[str, int] = field(default_factory=dict)  # replaced, never mutated
    bytes_exact: int = 0  # of bytes_sent, in messages whose lengths the host waited for
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_reduced: int = 0  # bytes given to the native all-reduce
    reduces: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0  # merges included
    wait_seconds: float = 0.0  # compute lane idle while a job was under way
    job_seconds: float = 0.0  # from submit to completion, summed over jobs

    def count(self, job: Job, done: Sequence[int], seconds: float) -> None:
        """Add finished tasks, a single one or all transfers of a slot, that took `seconds`."""
        amounts = job.prepared.counted.get(done[0])
        if amounts is None:
            amounts = _amounts(job, done)
            if job.prepared.constant:
                job.prepared.counted[done[0]] = amounts
        timed, sums = amounts
        for name, more in sums.items():
            setattr(self, name, getattr(self, name) + more)
        if timed is not None:
            setattr(self, timed, getattr(self, timed) + seconds)

    def __add__(self, other: Counters) -> Counters:
        """Sums of two executors of a rank."""
        return self._with(other, 1)

    def __sub__(self, earlier: Counters) -> Counters:
        """Sums since an earlier copy."""
        return self._with(earlier, -1)

    def _with(self, other: Counters, sign: int) -> Counters:
        both = Counters(self.world_size)
        for name in (each.name for each in fields(self) if each.name not in _OTHERS):
            setattr(both, name, getattr(self, name) + sign * getattr(other, name))
        unused = Sums(self.bytes_unused)
        unused.update({name: sign * size for name, size in other.bytes_unused.items()})
        both.bytes_unused = unused
        return both

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank puts on the wire: those sent and not spared, and for an all-reduce
        2 (N-1)/N of its size."""
        share = 2 * (self.world_size - 1) / self.world_size
        return self.bytes_sent - self.bytes_spared + share * self.bytes_reduced


def _amounts(job: Job, done: Sequence[int]) -> tuple[str | None, Mapping[str, int]]:
    """The counter of the tasks' seconds, if any, and further amounts by counter."""
    timed: str | None = None
    sums, prepared = Sums[str](), job.prepared
    for index in done:
        task, slot = prepared.members[index][-1], prepared.slots[index]
        match task:
            case Encode():
                timed = "encode_seconds"
            case Decode() | Merge() | Follow():
                timed = "decode_seconds"
            case Send():
                sums.update(
                    bytes_sent=prepared.size(index),
                    bytes_spared=slot.spared,
                    bytes_exact=slot.size if slot.exact else 0,
                    messages_sent=1,
                )
            case Recv():
                sums.update(bytes_received=prepared.size(index), messages_received=1)
            case Reduce():
                size = prepared.payloads.reduce_bytes(job.tasks[index])
                sums.update(bytes_reduced=size, reduces=1)
    return timed, sums
