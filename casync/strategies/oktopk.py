"""Split, reduce by regions, all-gather: Ok-Topk (Li and Hoefler 2022), with fixed regions.

Each rank selects once, from its whole tensor. Each region of the tensor has an owner; the other
ranks send it the values that they selected there, however many. The owner adds them up, selects
from the sum, and sends the result to all. With k values selected in either direction a rank sends
about 2 (N-1)/N k values, whatever the world size; with `exchange` it sends (N-1) k.

As in the paper: selection from whole tensors, a split of the selected values, a second selection
from the sums. Unlike the paper: an owner keeps the values that it rejects, which the paper returns
to their ranks; and it selects by the codec, in its region, so the values that it sends need no
balancing.

The paper moves regions every 64 steps, so that all hold equally many selected values. Here blocks
of 512 elements belong to regions in turn, so owners' residuals stay in place, and ranks need not
agree on regions during training. For 1% of a language model's gradients (the demo's) the largest of
4 regions holds 1.1 to 1.2 times the mean, of 16 1.2 to 1.5; contiguous regions would hold 2.6 to
3.8 and 4 to 10 times the mean. So moving regions could gain little.

The paper computes thresholds every 32 steps and reuses them. Here the codec computes them in every
step. On a CPU that costs 2.2 of the 5 ms in which `topk` encodes 5 million elements; for parameters
of that model a threshold up to 32 steps old keeps 0.8 to 3.3 times the requested values in the
median, and up to 19 times: the extra traffic would cost more than the computation.
"""

from __future__ import annotations

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import FLOAT_BYTES, Codec
from casync.regions import NONZERO, region_key
from casync.stages import Item, Setting, Stage, work
from casync.strategies import Result, refuse_single_encoder
from casync.topology import Spread, Topology

SPREADS: Spread = "tensors"
TWO_WAY = True
SHARES = False
RESULT: Result = "mean"

SMALLEST = 64 << 10  # bytes of gradient in a region: see [Note: how large a share is]


def refuses(codec: Codec, down: Codec) -> str | None:
    """Accepts the codecs of `ps`: ranks encode once, and owners of regions again."""
    return refuse_single_encoder(codec, down, "oktopk")


def owners(part: Part, world_size: int) -> tuple[int, ...]:
    """Owners of the regions: successive ranks, beginning with the part's owner."""
    return tuple((part.owner + number) % world_size for number in range(_regions(part, world_size)))


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Select, send owners the values in their regions, select again, and send the result to all."""
    n, owning = b.world_size, owners(part, b.world_size)
    count = len(owning)
    pairs = sorted(  # one distance per phase: each rank sends to one rank and receives from one
        ((other - owner) % n, number, owner, other)
        for number, owner in enumerate(owning)
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
    means = [_encode_mean(b, part, owner, number, count) for number, owner in enumerate(owning)]
    for distance, number, owner, other in pairs:
        b.phase = b.turn(second, distance - 1)
        b.send(means[number], part, owner, other, channel=1)
        b.decode(other, part, means[number])


def _encode_mean(b: Builder, part: Part, owner: int, number: int, count: int) -> int:
    """The owner of a region encodes the average of its region."""
    codec, last = region_key(part.down or part.codec, number, count, part.align), b.world_size
    return b.encode(owner, part, codec, "aggregator", average=True, writeback=True, number=last)


def _regions(part: Part, most: int) -> int:
    """Number of regions: 1 for small tensors, which may be fused ([Note: parts do not move])."""
    largest = max(length for _, length, *_ in part.rows)
    return max(1, min(most, FLOAT_BYTES * largest // SMALLEST))


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Ranks select and send each region to its owner, which adds, selects again and sends to all.
    Finding, adding and decoding a region's selected values run at the speed of a decode."""
    n = s.topology.world_size
    others = (n - 1) / n
    regions = (s.codec.decode, item.gradient * others, item.parts * (n - 1))
    sent = s.spread(item.payload * others)
    return (
        work((s.codec.encode, item.gradient, item.parts), regions),
        *sent,
        work(regions, (s.codec.encode, item.gradient / n, item.parts)),
        *sent,
        work(regions),
    )
