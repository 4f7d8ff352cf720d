"""Executors on connections of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from casync.codec import Codec
from casync.errors import PeerTimeout, PlanError, TransportError
from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.transports import SlotTransport, Transport
from casync.transports.distributed import DistributedTransport
from hipress import compat
from hipress.errors import AgreementTimeout, ConfigError
from hipress.model.devices import NCCL, ON_HOST, Placement
from hipress.options import Options
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import connect, own_store


def start_slots(
    purpose: str,
    coordinator: Coordinator,
    placement: Placement,
    memory: Memory,
    tell: Callable[[TransportError], None] = lambda error: None,
) -> SlotTransport | None:
    """The NCCL transport of a device's payloads; None if the placement has another transport.

    All ranks of the group must call this. tell: see NcclTransport.
    """
    if not placement.by_nccl:
        return None
    from casync.nccl.bindings import connect_by
    from casync.transports.nccl import NcclTransport

    rank, ranks, seconds = coordinator.rank, coordinator.ranks, coordinator.timeout
    binding, store = NCCL[placement.transport], own_store(coordinator, f"nccl/{purpose}")
    try:
        connected = connect_by(binding, rank, ranks, placement.device, store, seconds)
    except PlanError as error:  # a binding that is missing: it says how to install it
        raise ConfigError(f"transport={placement.transport!r}: {error}") from error
    except PeerTimeout as error:
        raise AgreementTimeout(str(error)) from error
    return NcclTransport(connected, rank, len(ranks), memory, seconds, tell=tell)


def start_executor(
    purpose: str,
    codecs: Mapping[str, Codec],
    options: Options,
    coordinator: Coordinator,
    deferred: Mapping[str, Sequence[str]],
    placement: Placement = ON_HOST,
    memory: Memory | None = None,
) -> Executor:
    """An executor on connections of its own; all ranks of the group must call this. memory: of
    payloads; by default the host's."""
    memory, executors = memory or HostMemory(), list[Executor]()

    def tell(error: TransportError) -> None:
        for each in executors:  # none before it is made: the transport may fail earlier
            each.abort(error)

    executor = Executor(
        _transport(purpose, coordinator, placement, memory, tell),
        codecs,
        RunOptions(
            seed=options.seed,
            timeout=options.timeout,
            watch=True,
            finished=coordinator.mailbox.has_finished,
            span=compat.profiled,
            checksum=options.checksum,
            deferred=deferred,
            waits=True,
            owns=True,
            epoch=coordinator.mailbox.epoch.number,
        ),
        memory=memory,
        ranks=coordinator.ranks,
    )
    executors.append(executor)
    return executor


def _transport(
    purpose: str,
    coordinator: Coordinator,
    placement: Placement,
    memory: Memory,
    tell: Callable[[TransportError], None],
) -> Transport | SlotTransport:
    """Connections for an executor. tell: see NcclTransport."""
    slots = start_slots(purpose, coordinator, placement, memory, tell)
    if slots is not None:
        return slots
    return DistributedTransport(
        connect(coordinator, purpose), lambda some: connect(coordinator.of(some), purpose)
    )
