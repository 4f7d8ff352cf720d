"""Executors on connections of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from casync.codec import Codec
from casync.errors import TransportError
from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.runtime.executor import Executor
from casync.transports import SlotTransport, Transport
from casync.transports.distributed import DistributedTransport
from hipress import compat
from hipress.devices import ON_HOST, Placement
from hipress.options import Options
from hipress.ranks.link import connect
from hipress.ranks.meeting import Meeting
from hipress.ranks.slots import start_slots


def start_executor(
    purpose: str,
    codecs: Mapping[str, Codec],
    options: Options,
    meeting: Meeting,
    deferred: Mapping[str, Sequence[str]],
    placement: Placement = ON_HOST,
    memory: Memory | None = None,
) -> Executor:
    """An executor on connections of its own; all ranks of the meeting must call this. memory: of
    payloads; by default the host's."""
    memory, made = memory or HostMemory(), list[Executor]()

    def tell(error: TransportError) -> None:
        for each in made:
            each.abort(error)

    executor = Executor(
        _transport(purpose, meeting, placement, memory, tell),
        codecs,
        memory=memory,
        seed=options.seed,
        timeout=options.timeout,
        ranks=meeting.ranks,
        watch=True,
        span=compat.profiled,
        checksum=options.checksum,
        deferred=deferred,
        waits=True,
        capture=options.capture,
        owns=True,
    )
    made.append(executor)
    return executor


def _transport(
    purpose: str,
    meeting: Meeting,
    placement: Placement,
    memory: Memory,
    tell: Callable[[TransportError], None],
) -> Transport | SlotTransport:
    """Connections for an executor. tell: see NcclTransport."""
    slots = start_slots(purpose, meeting, placement, memory, tell)
    if slots is not None:
        return slots
    return DistributedTransport(
        connect(meeting, purpose), lambda some: connect(meeting.of(some), purpose)
    )
