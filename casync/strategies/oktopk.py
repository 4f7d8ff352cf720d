"""Split, reduce by regions, all-gather: Ok-Topk (Li and Hoefler 2022), with regions that stay.

Each rank selects from its whole tensor, once. Each region of the tensor has an owner, to whom the
others send what they selected there, however much that is. The owner adds it up, selects from the
sum, and sends that to everybody. With k values selected in either go a rank sends about 2 (N-1)/N k
values, whatever the world size, and `allgather` (N-1) k.

As published: selection from whole tensors, a split by what was selected, a second selection from
the sums. What differs: an owner keeps what it rejects, which there goes back to the ranks it came
from; it selects by the codec, in its region, so that what it sends back needs no balancing.

There regions move every 64 steps, to hold as much of what is selected as any other. Here blocks of
512 elements belong to regions in turn, so owners' residuals stay where they are, and ranks need not
agree on anything as they train. For the 1% of a language model's gradients (the demo's) the largest
of 4 regions holds 1.1 to 1.2 times the mean, of 16 1.2 to 1.5; regions of one piece, 2.6 to 3.8 and
4 to 10. So little is left for regions that move.

There thresholds are computed every 32 steps and used again between. Here they are the codec's, of
every step. On a CPU that costs 2.2 of the 5 ms in which `topk` encodes 5 million elements; for
parameters of that model a threshold of up to 32 steps before keeps 0.8 to 3.3 times the values
asked for, in the median, and up to 19 times: what is saved is less than what would be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casync.codec import FLOAT_BYTES
from casync.regions import NONZERO, region_key
from casync.strategies import refuse_single_encoder

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.graph.builder import Builder
    from casync.graph.plan import Part
    from casync.topology import Spread, Topology

SPREADS: Spread = "tensors"
TWO_WAY = True

SMALLEST = 64 << 10  # bytes of gradient in a region: see [Note: how small a chunk may be]


def refuses(codec: Codec, down: Codec) -> str | None:
    """As `ps`: ranks encode once, owners of regions again."""
    return refuse_single_encoder(codec, down, "oktopk")


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Select; give owners what is in their regions; select again; give that to all."""
    n, count = b.world_size, _regions(part, b.world_size)
    owners = [(part.owner + number) % n for number in range(count)]
    pairs = sorted(  # at a distance a phase, in which each rank sends to one and receives from one
        ((other - owner) % n, number, owner, other)
        for number, owner in enumerate(owners)
        for other in b.others(owner, topology.ranks)
    )
    for rank in b.ranks:
        b.encode(rank, part, part.codec, "worker", writeback=True, number=0)
    selected = [region_key(NONZERO, number, count, part.align) for number in range(count)]
    pushed = [
        b.encode(other, part, selected[number], "worker", number=distance)
        for distance, number, _, other in pairs
    ]
    for payload, (distance, _, owner, other) in zip(pushed, pairs, strict=True):
        b.phase = b.turn(0, distance - 1)
        b.send(payload, part, other, owner, channel=0)
        b.merge(owner, part, payload)
    second = b.phase = b.past(0, n - 1)
    means = [_encode_mean(b, part, owner, number, count) for number, owner in enumerate(owners)]
    for distance, number, owner, other in pairs:
        b.phase = b.turn(second, distance - 1)
        b.send(means[number], part, owner, other, channel=1)
        b.decode(other, part, means[number])


def _encode_mean(b: Builder, part: Part, owner: int, number: int, count: int) -> int:
    """The owner of a region encodes the average, from the sum that is there."""
    codec, last = region_key(part.down or part.codec, number, count, part.align), b.world_size
    return b.encode(owner, part, codec, "aggregator", average=True, writeback=True, number=last)


def _regions(part: Part, most: int) -> int:
    """One for a part of small tensors, which may be with others next: [Note: parts do not move]."""
    largest = max(length for _, length, *_ in part.rows)
    return max(1, min(most, FLOAT_BYTES * largest // SMALLEST))
