"""Time of a step of FSDP2: computation, gathers of weights and scatters of gradients.

[Note: the course of a step] A module of `fully_shard` waits for its weights, begins to gather those
of the next one, and computes; after its backward pass its gradients leave. The root's weights stay
from the forward to the backward pass, all others are gathered for each. A rank computes or works
for a codec, and each link carries one collective at a time, in the order in which they begin.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from casync.stages import WORK, Stage

__all__ = ["ROOT", "Collectives", "Part", "predict_step"]

ROOT = 0  # number of the root's group

_Chain = tuple[Stage, ...]


@dataclass(frozen=True)
class Part:
    """Neighbouring operators that use the parameters of one group. Seconds."""

    group: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Collectives:
    """Stages of the gather and of the scatter of each group, and how far they overlap."""

    gathers: Sequence[_Chain]
    scatters: Sequence[_Chain]
    ahead: tuple[bool, bool]  # True if the next weights are gathered meanwhile: forward, backward
    in_flight: int  # scatters that may be under way while the backward pass goes on


def predict_step(parts: Sequence[Part], collectives: Collectives) -> tuple[float, float]:
    """Seconds of a step, and of its backward pass. parts: in the order of the backward pass."""
    rank = _Rank()
    forward = _Pass(rank, collectives, [(p.group, p.forward) for p in reversed(parts)], 0)
    for group, seconds in forward.parts:
        forward.enter(group)
        rank.compute(seconds)
    begun, left = rank.now, Counter(part.group for part in parts)
    backward = _Pass(rank, collectives, [(p.group, p.backward) for p in parts], 1)
    sums = deque[tuple[_Chain, float]]()
    for group, seconds in backward.parts:
        backward.enter(group)
        rank.compute(seconds)
        left[group] -= 1
        if not left[group]:
            sums.append((collectives.scatters[group], rank.begin(collectives.scatters[group])))
        while len(sums) > collectives.in_flight:
            rank.end(*sums.popleft())
    passed = rank.now - begun
    for chain, there in sums:
        rank.end(chain, there)
    return rank.now, passed


class _Pass:
    """Weights on their way in a forward (0) or backward (1) pass."""

    def __init__(
        self, rank: _Rank, collectives: Collectives, parts: Sequence[tuple[int, float]], number: int
    ) -> None:
        self.parts, self._rank, self._gathers = parts, rank, collectives.gathers
        self._ahead, self._kept = collectives.ahead[number], {ROOT} if number else set[int]()
        self._order = deque(dict.fromkeys(group for group, _ in parts))
        self._begun: dict[int, float] = {}  # time at which weights are there, by group

    def enter(self, group: int) -> None:
        """Have the weights of a group, and begin to gather the next ones, when it is first used."""
        if not self._order or self._order[0] != group:
            return
        self._order.popleft()
        self._gather(group)
        if group in self._begun:
            self._rank.end(self._gathers[group], self._begun[group])
        if self._ahead and self._order:
            self._gather(self._order[0])

    def _gather(self, group: int) -> None:
        if group not in self._kept:
            self._kept.add(group)
            self._begun[group] = self._rank.begin(self._gathers[group])


class _Rank:
    """A rank's clock, and the times at which its links are free. Seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._free: defaultdict[str, float] = defaultdict(float)
        self._taken = 0.0  # share of a computation's speed that transfers take

    def compute(self, seconds: float) -> None:
        """Compute, more slowly while a link is busy."""
        busy = max((free - self.now for free in self._free.values()), default=0.0)
        self.now += seconds + self._taken * min(seconds, max(0.0, busy))

    def begin(self, chain: _Chain) -> float:
        """Do the work before the transfers of a collective; return when they are over."""
        while chain and chain[0].lane == WORK:
            self.now += chain[0].seconds
            chain = chain[1:]
        there = self.now
        for stage in chain:
            if stage.lane != WORK:
                begun = max(there, self._free[stage.lane])
                self._free[stage.lane] = begun + stage.seconds
                self._taken = min(1.0, stage.cores + stage.slows)
                there = self._free[stage.lane] + stage.delay
        return there

    def end(self, chain: _Chain, there: float) -> None:
        """Wait for the transfers, and do the work between and after them."""
        self.now = max(self.now, there)
        while chain and chain[0].lane == WORK:
            chain = chain[1:]
        self.now += sum(stage.seconds for stage in chain if stage.lane == WORK)
