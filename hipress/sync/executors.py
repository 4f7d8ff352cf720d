"""Executors on connections of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from casync.codec import Codec
from casync.errors import PlanError, TransportError
from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.runtime.executor import Executor
from casync.transports import SlotTransport, Transport
from casync.transports.distributed import DistributedTransport
from hipress import compat
from hipress.devices import NCCL, ON_HOST, Placement
from hipress.errors import ConfigError
from hipress.options import Options
from hipress.ranks.link import connect, own_store
from hipress.ranks.meeting import Meeting


def start_executor(
    purpose: str,
    codecs: Mapping[str, Codec],
    options: Options,
    meeting: Meeting,
    deferred: Mapping[str, Sequence[str]],
    placement: Placement = ON_HOST,
    memory: Memory | None = None,
) -> Executor:
    """An executor on connections of its own; all ranks of the meeting must call this. memory:
    where payloads are; by default the host's."""
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
    """Connections of our own. tell: see NcclTransport."""
    slots = start_slots(purpose, meeting, placement, memory, tell)
    if slots is not None:
        return slots
    return DistributedTransport(
        connect(meeting, purpose), lambda some: connect(meeting.of(some), purpose)
    )


def start_slots(
    purpose: str,
    meeting: Meeting,
    placement: Placement,
    memory: Memory,
    tell: Callable[[TransportError], None] = lambda error: None,
) -> SlotTransport | None:
    """NCCL between the ranks, by connections of our own, where payloads travel by that. All ranks
    of the meeting must call this. tell: see NcclTransport."""
    if placement.transport not in NCCL:
        return None
    from casync.nccl.bindings import connect_by
    from casync.transports.nccl import NcclTransport

    rank, ranks, seconds = meeting.rank, meeting.ranks, meeting.timeout
    binding, store = NCCL[placement.transport], own_store(meeting, f"nccl/{purpose}")
    try:
        connected = connect_by(binding, rank, ranks, placement.device, store, seconds)
    except PlanError as error:  # a binding that is missing: it says how to install it
        raise ConfigError(f"transport={placement.transport!r}: {error}") from error
    return NcclTransport(connected, rank, len(ranks), memory, seconds, tell=tell)
