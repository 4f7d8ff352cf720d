"""The native collective: for no codec, and for payloads that add without decoding.

A codec with rounds has several such payloads, each of which builds on the sum of the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from casync import rounds
from casync.strategies import instead, refuse_vote

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.graph.builder import Builder
    from casync.graph.plan import Part

SPREADS = False


def refuses(codec: Codec | None) -> str | None:
    """Carries raw float32, additive codecs and those with rounds."""
    if codec is None or codec.rounds:
        return None
    if codec.vote:
        return refuse_vote(codec, "allreduce")
    if codec.additive is None:
        return (
            f"payloads of codec {codec.name!r} do not add, which strategy 'allreduce' needs; "
            f"use {instead(codec)}"
        )
    if not codec.fixed:
        return f"codec {codec.name!r} is additive but of varying length; use strategy 'allgather'"
    return None


def build(b: Builder, part: Part) -> Iterator[None]:
    """Scale by 1/N, sum natively, decode. Without a codec the bucket itself is summed."""
    if part.rounds:
        yield from rounds.build(b, part)
        return
    payloads = [
        b.encode(rank, part, "worker", average=True, writeback=part.codec is None)
        for rank in range(b.world_size)
    ]
    b.reduce(part, payloads)
    yield
    if part.codec is not None:
        for rank, payload in enumerate(payloads):
            b.decode(rank, part, payload)
