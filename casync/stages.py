"""What a rank does, in turn, to synchronize gradients: its part of a timeline.

All ranks do the same, so one rank's stages say it all: work on a core or a device, transfers
between nodes and within one, and copies between a device and the host. Each takes a lane, by name.
Of owners it is the mean rank's share. A merge that is followed by an encode is one kernel, of a
cost of its own. A strategy's stages stand beside its `build`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from casync.cost import CodecCost, Costs, Line, Transfer
from casync.topology import Topology

__all__ = [
    "ENTER",
    "INSIDE",
    "LEAVE",
    "TASK",
    "WIRE",
    "WORK",
    "Item",
    "Setting",
    "Stage",
    "transfer",
    "work",
]

#: lanes: a core or the device, the links between and within nodes, a device's ways to its host and
#: back. Other names are lanes as well, which nothing else shares.
WORK, WIRE, INSIDE, LEAVE, ENTER = "work", "wire", "inside", "leave", "enter"

#: seconds of a core that a task takes besides its codec: python -m bench.tasks
TASK = 5e-5


@dataclass(frozen=True)
class Stage:
    """Every rank takes a lane for some time."""

    lane: str  # WORK, WIRE, INSIDE, LEAVE, ENTER, or any other name
    seconds: float  # while the lane is taken
    delay: float = 0.0  # from then until what follows may begin
    cores: float = 0.0  # that a transfer keeps busy
    size: float = 0.0  # bytes of a transfer
    slows: float = 0.0  # share of its speed that a backward pass loses meanwhile

    def waiting(self, busiest: float) -> Stage:
        """The same, of a mean rank: others wait for the busiest owner, while their links and cores
        are free. busiest: what that owns, over the mean."""
        return replace(self, delay=self.delay + max(0.0, busiest - 1) * self.seconds)


@dataclass(frozen=True)
class Item:
    """What is synchronized alike and follows one another: bytes over all ranks' owners."""

    gradient: float  # bytes
    payload: float  # bytes
    parts: float  # each a message of its own, over all owners
    additive: str = "float32"  # number type, of an all-reduce
    rounds: int = 1  # all-reduces, one after the other
    busiest: float = 1.0  # times the mean of all ranks: what one owns


@dataclass(frozen=True)
class Setting:
    """A cluster, a codec, and what strategies have in common there."""

    topology: Topology
    costs: Costs
    codec: CodecCost
    batch: float  # gradient bytes of a call for several parts

    def spread(self, size: float) -> tuple[Stage, ...]:
        """Every rank sends so many bytes, in equal shares, to all others."""
        n, near = self.topology.world_size, 0
        if self.topology.nested:
            near = self.topology.largest - 1
        far, others = n - 1 - near, max(1, n - 1)
        stage = transfer(self.costs.to(far), size * far / others)
        if not near:
            return (stage,)
        return (stage, transfer(self.costs.inside, size * near / others, near, INSIDE))

    def reduce(self, size: float, calls: float, kind: str) -> Stage:
        """The native all-reduce of so many bytes of a number type."""
        return transfer(self.costs.reduce[kind], size, min(calls, 1.0))

    def at_once(self, parts: float, size: float) -> float:
        """Calls for so many parts of so many bytes of gradient: see [Note: bulk] in joining.py."""
        return min(parts, max(1.0, size / self.batch))

    def by_halves(self, parts: float, size: float, peers: int) -> float:
        """Likewise where they come from so many peers, one after the other."""
        return min(parts, max(float(peers.bit_length()), size / self.batch))

    def merge_and_encode(self, item: Item, merges: int, share: float) -> Stage:
        """An owner of a share of all adds so many payloads, the last as it encodes."""
        size, calls = item.gradient * share, item.parts * share
        first = (self.codec.decode, size * (merges - 1), calls * (merges.bit_length() - 1))
        return work(first, (self.codec.hop, size, calls)).waiting(item.busiest)


def transfer(kind: Transfer, size: float, times: float = 1, lane: str = WIRE) -> Stage:
    """Bytes take the link; latencies pass beside other transfers."""
    line = kind.line
    return Stage(lane, line.per_byte * size, line.latency * times, kind.cores, size, kind.slows)


def work(*steps: tuple[Line, float, float]) -> Stage:
    """Steps on a core: a curve, bytes, and in how many calls."""
    seconds = (calls * (line.latency + TASK) + line.per_byte * size for line, size, calls in steps)
    return Stage(WORK, sum(seconds))
