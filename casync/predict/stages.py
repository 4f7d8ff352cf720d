"""What a rank does, in turn, to synchronize gradients by a strategy: its part of a timeline.

All ranks do the same, so one rank's stages say it all: work on a core or a device, transfers
between nodes and within one, and copies between a device and the host. Each takes a lane, by name.
Of owners it is the mean rank's share. A merge that is followed by an encode is one kernel, of a
cost of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from casync.graph.plan import BATCH_BYTES
from casync.predict.cost import CodecCost, Copies, Costs, Line, Transfer
from casync.topology import Topology

__all__ = [
    "ENTER",
    "INSIDE",
    "LEAVE",
    "PREDICTED",
    "TASK",
    "WIRE",
    "WORK",
    "Item",
    "Stage",
    "native",
    "stages",
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
class _Setting:
    topology: Topology
    costs: Costs
    codec: CodecCost

    def spread(self, size: float) -> tuple[Stage, ...]:
        """Every rank sends so much, in equal shares, to all others."""
        n, near = self.topology.world_size, 0
        if self.topology.nested:
            near = self.topology.largest - 1
        far, others = n - 1 - near, max(1, n - 1)
        stage = transfer(self.costs.to(far), size * far / others)
        if not near:
            return (stage,)
        return (stage, transfer(self.costs.inside, size * near / others, near, INSIDE))


def transfer(kind: Transfer, size: float, times: float = 1, lane: str = WIRE) -> Stage:
    """Bytes take the link; latencies pass beside other transfers."""
    line = kind.line
    return Stage(lane, line.per_byte * size, line.latency * times, kind.cores, size, kind.slows)


def work(*steps: tuple[Line, float, float]) -> Stage:
    """Steps on a core: a curve, bytes, and in how many calls."""
    seconds = (calls * (line.latency + TASK) + line.per_byte * size for line, size, calls in steps)
    return Stage(WORK, sum(seconds))


def native(size: float, costs: Costs) -> tuple[Stage, ...]:
    """The native all-reduce of so many bytes."""
    return _copied((_reduce(size, 1, costs, "float32"),), size, costs.copies)


def stages(
    strategy: str, item: Item, codec: CodecCost, topology: Topology, costs: Costs
) -> tuple[Stage, ...]:
    """What each rank does for `item`, by one of PREDICTED."""
    made = _STAGES[strategy](item, _Setting(topology, costs, codec))
    return _copied(made, item.gradient, costs.copies)


def _copied(chain: tuple[Stage, ...], gradient: float, copies: Copies | None) -> tuple[Stage, ...]:
    """With what leaves a device, and enters it: gradients, or what travels."""
    if copies is None:
        return chain
    if copies.gradients:
        leave, enter = _copies(gradient, copies)
        return (leave, *chain, enter)
    found: list[Stage] = []
    for stage in chain:
        leave, enter = _copies(stage.size, copies)
        found += [leave, stage, enter] if stage.lane in (WIRE, INSIDE) else [stage]
    return tuple(found)


def _copies(size: float, copies: Copies) -> tuple[Stage, Stage]:
    return Stage(LEAVE, copies.leave(size)), Stage(ENTER, copies.enter(size))


def _reduce(size: float, calls: float, costs: Costs, kind: str) -> Stage:
    return transfer(costs.reduce[kind], size, min(calls, 1.0))


def _all_reduce(item: Item, s: _Setting) -> tuple[Stage, ...]:
    """Of codecs with several rounds each sends its share, and takes its share of the encode."""
    share = 1 / item.rounds
    calls = _at_once(item.parts, item.gradient) if item.rounds == 1 else item.parts * share
    each = (
        work((s.codec.encode, item.gradient * share, calls)),
        _reduce(item.payload * share, item.parts, s.costs, item.additive),
    )
    return (*each * item.rounds, work((s.codec.decode, item.gradient, item.parts)))


def _waiting(stage: Stage, busiest: float) -> Stage:
    """Others wait for the busiest owner, while their links and cores are free."""
    return replace(stage, delay=stage.delay + max(0.0, busiest - 1) * stage.seconds)


def _at_once(parts: float, size: float) -> float:
    """Calls for so many parts of so many bytes of gradient: see [Note: bulk] in joining.py."""
    return min(parts, max(1.0, size / BATCH_BYTES))


def _by_halves(parts: float, size: float, peers: int) -> float:
    """Likewise where they come from so many peers, one after the other."""
    return min(parts, max(float(peers.bit_length()), size / BATCH_BYTES))


def _ps(item: Item, s: _Setting) -> tuple[Stage, ...]:
    """To owners all but their own, which add and encode once, and back."""
    n = s.topology.world_size
    others, own = (n - 1) / n, 1 / n
    sent = [_waiting(stage, item.busiest) for stage in s.spread(item.payload * others)]
    size, parts = item.gradient * others, item.parts * others
    return (
        work((s.codec.encode, size, _at_once(parts, size))),
        *sent,
        _merge_and_encode(item, s, n - 1, own),
        *sent,
        work((s.codec.decode, size, _by_halves(parts, size, n - 1))),
    )


def _merge_and_encode(item: Item, s: _Setting, merges: int, share: float) -> Stage:
    """An owner of a share of all adds so many payloads, the last as it encodes."""
    size, calls = item.gradient * share, item.parts * share
    first = (s.codec.decode, size * (merges - 1), calls * (merges.bit_length() - 1))
    return _waiting(work(first, (s.codec.hop, size, calls)), item.busiest)


def _ring(item: Item, s: _Setting) -> tuple[Stage, ...]:
    """N-1 hops, each of which decodes, adds and encodes, and N-1 that only decode."""
    n = s.topology.world_size
    share = (n - 1) / n
    kind = s.costs.to(1)
    sent = transfer(kind, item.payload * share, n - 1)
    return (
        work((s.codec.encode, item.gradient / n, item.parts / n)),
        sent,
        work((s.codec.hop, item.gradient * share, item.parts * share)),
        sent,
        work((s.codec.decode, item.gradient * share, item.parts * share)),
    )


def _allgather(item: Item, s: _Setting) -> tuple[Stage, ...]:
    """Everybody encodes once and decodes everybody."""
    n = s.topology.world_size
    return (
        work((s.codec.encode, item.gradient, _at_once(item.parts, item.gradient))),
        *s.spread(item.payload * (n - 1)),
        work((s.codec.decode, item.gradient * n, item.parts * (1 + n.bit_length()))),
    )


def _hierarchical(item: Item, s: _Setting) -> tuple[Stage, ...]:
    """Raw to a leader in the node, `ps` between the M leaders of a chunk, payloads back inside."""
    m, members = len(s.topology.nodes), s.topology.largest
    led, inside = 1 / members, (members - 1) / members
    crossing = transfer(s.costs.to(m - 1), item.payload * led * (m - 1) / m)
    crossing = _waiting(crossing, item.busiest)
    far = led * (m - 1) / m
    size, peers = item.gradient * far, s.topology.world_size - 1
    return (
        transfer(s.costs.inside, item.gradient * inside, members - 1, INSIDE),
        work((s.codec.encode, size, _at_once(item.parts * far, size))),
        crossing,
        _merge_and_encode(item, s, m - 1, led / m),
        crossing,
        transfer(s.costs.inside, item.payload * inside, members - 1, INSIDE),
        work((s.codec.decode, item.gradient, _by_halves(item.parts, item.gradient, peers))),
    )


def _gtopk(item: Item, s: _Setting) -> tuple[Stage, ...]:
    """Up a tree, where ranks with children, the half, add and encode, and down. A chunk takes as
    many turns as there are levels, while the links carry others."""
    n = s.topology.world_size
    levels, inner, chunks = (n - 1).bit_length(), n // 2 / n, max(1.0, item.parts)
    kind, others = s.costs.to(1), (n - 1) / n
    sent = transfer(kind, item.payload * others, levels)
    turn = kind.line.per_byte * item.payload / chunks
    added = work((s.codec.hop, item.gradient / chunks, 1)).seconds
    up = replace(sent, delay=sent.delay + (levels - 1) * (turn + added))
    down = replace(sent, delay=sent.delay + (levels - 1) * turn)
    leaves, more = 1 - inner, others - inner
    return (
        work((s.codec.encode, item.gradient * leaves, item.parts * leaves)),
        up,
        work(
            (s.codec.decode, item.gradient * more, item.parts * more),
            (s.codec.hop, item.gradient * inner, item.parts * inner),
        ),
        down,
        work((s.codec.decode, item.gradient * others, item.parts * others)),
    )


def _oktopk(item: Item, s: _Setting) -> tuple[Stage, ...]:
    """Selects, gives owners of regions what is there, which add and select again, and sends that
    back. What is selected in a region is found, added and decoded at the speed of a decode."""
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


_STAGES: Mapping[str, Callable[[Item, _Setting], tuple[Stage, ...]]] = {
    "allreduce": _all_reduce,
    "ps": _ps,
    "ring": _ring,
    "allgather": _allgather,
    "hierarchical": _hierarchical,
    "gtopk": _gtopk,
    "oktopk": _oktopk,
}
#: strategies of which a step is predicted; `simulate` takes all
PREDICTED = tuple(_STAGES)
