"""Costs of a module's steps on this rank, and the bytes that DDP alone would send."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from casync.runtime.counters import Counters
    from hipress.engine.reduction import Traffic


@dataclass(frozen=True)
class Sent:
    """Bytes a step of one kind of gradients, on one rank."""

    gradient_bytes: float  # the gradients themselves
    ddp_bytes: float  # sent by this rank with DDP alone
    wire_bytes: float  # sent by this rank

    @property
    def reduction(self) -> float:
        """Bytes of DDP alone over bytes sent; 1 if nothing would be sent."""
        if self.wire_bytes:
            return self.ddp_bytes / self.wire_bytes
        return math.inf if self.ddp_bytes else 1.0


@dataclass(frozen=True)
class Measured:
    """Per step, on this rank, averaged over the steps of this process."""

    steps: int
    kinds: Mapping[str, Sent]  # "compressed", "uncompressed" and "sparse" gradients
    gradient_bytes: float  # of all kinds, as are the next two
    ddp_wire_bytes: float
    wire_bytes: float
    payload_bytes: float  # of messages to peers
    spared_bytes: float  # of these, repeated blocks that are not sent
    unused_bytes: Mapping[str, float]  # of these, unused capacity by codec
    exact_bytes: float  # of these, in messages whose lengths the host waited for
    encode_seconds: float
    decode_seconds: float
    wait_seconds: float  # compute lane idle while buckets were under way
    exposed_seconds: float  # the backward pass was over and waited for buckets


def measure_of(traffic: Traffic, counters: Counters, world_size: int) -> Measured | None:
    """Averages per step from an engine's counts; None before the first step."""
    steps = traffic.steps
    if steps == 0:
        return None
    kinds = _kinds(traffic, counters, world_size)
    total = total_of(kinds.values())
    return Measured(
        steps=steps,
        kinds=kinds,
        gradient_bytes=total.gradient_bytes,
        ddp_wire_bytes=total.ddp_bytes,
        wire_bytes=total.wire_bytes,
        payload_bytes=counters.bytes_sent / steps,
        spared_bytes=counters.bytes_spared / steps,
        exact_bytes=counters.bytes_exact / steps,
        unused_bytes={name: n / steps for name, n in sorted(counters.bytes_unused.items())},
        encode_seconds=counters.encode_seconds / steps,
        decode_seconds=counters.decode_seconds / steps,
        wait_seconds=counters.wait_seconds / steps,
        exposed_seconds=traffic.exposed_seconds / steps,
    )


def _kinds(traffic: Traffic, counters: Counters, world_size: int) -> dict[str, Sent]:
    """Bytes sent of each kind of gradients. gloo gathers sparse ones: each rank sends its own, or
    passes on another's, to every other rank."""
    steps, ring = traffic.steps, _share(world_size)
    plain = traffic.gradient_bytes - traffic.compressed_bytes
    sparse = (world_size - 1) * traffic.sparse_bytes
    kinds = {
        "compressed": (
            traffic.compressed_bytes,
            ring * traffic.compressed_bytes,
            counters.wire_bytes - ring * traffic.mixed_bytes,
        ),
        "uncompressed": (plain, ring * plain, ring * (traffic.raw_bytes + traffic.mixed_bytes)),
        "sparse": (traffic.sparse_bytes, sparse, sparse),
    }
    return {name: Sent(*(count / steps for count in counts)) for name, counts in kinds.items()}


def total_of(kinds: Iterable[Sent]) -> Sent:
    """The sum of all kinds."""
    each = list(kinds)
    return Sent(
        sum(kind.gradient_bytes for kind in each),
        sum(kind.ddp_bytes for kind in each),
        sum(kind.wire_bytes for kind in each),
    )


def _share(world_size: int) -> float:
    """Bytes that a rank sends in an all-reduce, per byte of data."""
    return 2 * (world_size - 1) / world_size


def all_reduce_bytes(numel: int, world_size: int) -> float:
    """Bytes that a rank sends to average `numel` float32 numbers natively."""
    return _share(world_size) * 4 * numel
