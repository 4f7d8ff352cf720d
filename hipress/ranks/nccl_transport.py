"""NCCL between the ranks, by communicators of hipress."""

from __future__ import annotations

from collections.abc import Callable

from casync.errors import PeerTimeout, PlanError, TransportError
from casync.memory import Memory
from casync.transports import SlotTransport
from hipress.errors import AgreementTimeout, ConfigError
from hipress.model.devices import NCCL, Placement
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.link import own_store


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
