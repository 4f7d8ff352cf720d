"""Stages of a synchronization: the successive work of a rank, as its part of a timeline.

All ranks do the same, so the stages of one suffice: work on a core or a device, transfers between
nodes and inside a node, and copies between a device and the host. Each takes a lane, by name.
Owners' work counts with the mean rank's share. A merge followed by an encode is one kernel with a
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

#: lanes: a core or the device, the links between and inside nodes, and copies from a device to its
#: host and back. Any other name is a lane of its own.
WORK, WIRE, INSIDE, LEAVE, ENTER = "work", "wire", "inside", "leave", "enter"

#: core seconds of a task besides its codec: python -m bench.tasks
TASK = 5e-5


@dataclass(frozen=True)
class Stage:
    """A time during which every rank occupies a lane."""

    lane: str  # WORK, WIRE, INSIDE, LEAVE, ENTER, or any other name
    seconds: float  # in which the lane is occupied
    delay: float = 0.0  # seconds from then until the next stage may begin
    cores: float = 0.0  # cores that a transfer keeps busy
    size: float = 0.0  # bytes of a transfer
    slows: float = 0.0  # share of its speed that a backward pass loses meanwhile

    def waiting(self, busiest: float) -> Stage:
        """The stage of a mean rank, which then waits for the busiest owner with its links and cores
        free. busiest: that owner's share over the mean share."""
        return replace(self, delay=self.delay + max(0.0, busiest - 1) * self.seconds)


@dataclass(frozen=True)
class Item:
    """Parts that are synchronized alike, one after the other; sums over all owners."""

    gradient: float  # bytes
    payload: float  # bytes
    parts: float  # messages, over all owners
    additive: str = "float32"  # number type, of an all-reduce
    rounds: int = 1  # all-reduces, one after the other
    busiest: float = 1.0  # largest share of an owner over the mean share


@dataclass(frozen=True)
class Setting:
    """A cluster and a codec, with the stages that strategies share."""

    topology: Topology
    costs: Costs
    codec: CodecCost
    batch: float  # gradient bytes of a call for several parts
    groups: Topology  # the topology as the strategy sees it

    @property
    def peers(self) -> int:
        """Other ranks that a leader exchanges payloads with; without nodes all others."""
        return len(self.groups.nodes) - 1

    @property
    def far(self) -> float:
        """Share of all values that a rank encodes as a leader, and sends to other owners."""
        return self.peers / len(self.groups.nodes) / self.groups.largest

    def inside(self, size: float) -> tuple[Stage, ...]:
        """Stage in which nodes of several ranks share out `size` bytes inside."""
        others = self.groups.largest - 1
        if not others:
            return ()
        return (transfer(self.costs.inside, size * (others / (others + 1)), others, INSIDE),)

    def spread(self, size: float) -> tuple[Stage, ...]:
        """Stages in which every rank sends `size` bytes, in equal shares, to its peers."""
        near = 0
        if self.topology.nested and not self.groups.nested:
            near = self.topology.largest - 1
        far, others = self.peers - near, max(1, self.peers)
        stage = self.between(size * far / others, far)
        if not near:
            return (stage,)
        return (stage, transfer(self.costs.inside, size * near / others, near, INSIDE))

    def between(self, size: float, peers: int) -> Stage:
        """Stage that sends `size` bytes to ranks of other nodes at once."""
        return transfer(self.costs.to(peers), size)

    def reduce(self, size: float, calls: float, kind: str) -> Stage:
        """Stage of a native all-reduce of `size` bytes of the number type `kind`."""
        return transfer(self.costs.reduce[kind], size, min(calls, 1.0))

    def at_once(self, parts: float, size: float) -> float:
        """Codec calls for parts of `size` bytes of gradient: see [Note: bulk] in joining.py."""
        return min(parts, max(1.0, size / self.batch))

    def by_halves(self, parts: float, size: float, peers: int) -> float:
        """Codec calls for parts that come from `peers` ranks, one after the other."""
        return min(parts, max(float(peers.bit_length()), size / self.batch))

    def merge_and_encode(self, item: Item, merges: int, share: float) -> Stage:
        """Stage in which an owner of `share` adds `merges` payloads, the last one as it encodes."""
        size, calls = item.gradient * share, item.parts * share
        first = (self.codec.decode, size * (merges - 1), calls * (merges.bit_length() - 1))
        return work(first, (self.codec.hop, size, calls)).waiting(item.busiest)


def transfer(kind: Transfer, size: float, times: float = 1, lane: str = WIRE) -> Stage:
    """Stage of a transfer: bytes occupy the link; latencies overlap with other transfers."""
    line = kind.line
    return Stage(lane, line.per_byte * size, line.latency * times, kind.cores, size, kind.slows)


def work(*steps: tuple[Line, float, float]) -> Stage:
    """Stage of steps on a core; each step is a curve, bytes, and a number of calls."""
    seconds = (calls * (line.latency + TASK) + line.per_byte * size for line, size, calls in steps)
    return Stage(WORK, sum(seconds))
