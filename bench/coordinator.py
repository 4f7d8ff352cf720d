"""The possible gain of a coordinator of messages if one rank is slow: python -m bench.coordinator

A model of `ps` in messages. The buckets of a backward pass become ready one after the other; in
each step a random rank is slower than the others. Every rank sends its share of a bucket to each
owner, which sends the average back to each rank once it has all shares. Links are full duplex.

- as it is: a rank sends ready messages, first come first served; messages that a receiver cannot
  take yet wait in buffers;
- coordinated, as in HiPress: a coordinator that knows all ready messages starts one when both ends
  are free, results and early buckets first. A request and its grant take a round trip;
- free: the same with a coordinator whose requests and grants take no time.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import typer

Ready: TypeAlias = Sequence[Sequence[float]]  # by rank and bucket: seconds
Order: TypeAlias = tuple[bool, int, int, int]  # a contribution, bucket, from, to

BACKWARD, BUCKETS, LATENCY, OWNER = 0.1, 13, 5e-5, 2e-4  # seconds, and a number of buckets
RANKS, STEPS = (4, 8), 10
SLOWER = (0.0, 0.1, 0.3, 1.0)  # extra share of time of the slow rank
WIRE = (0.5, 0.9, 1.5)  # time of all of a step's messages on a link, over the backward pass


@dataclass(frozen=True)
class Links:
    """Times of a rank's link, in seconds."""

    message: float  # in which a message occupies either end
    latency: float  # until the message has arrived
    grant: float = 0.0  # of a request to the coordinator, and its answer


class _Run:
    """A step. rule: True if a coordinator starts messages."""

    def __init__(self, ready: Ready, links: Links, rule: bool) -> None:
        self._links, self._rule, self._ranks = links, rule, len(ready)
        self._out, self._in = [0.0] * len(ready), [0.0] * len(ready)
        self._left = Counter[tuple[int, int]]()  # (bucket, owner): contributions to come
        self._waiting: list[Order] = []
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._number, self.end = 0, 0.0
        for rank, times in enumerate(ready):
            for bucket, at in enumerate(times):
                self._left.update((bucket, owner) for owner in range(self._ranks))
                self._later(at, partial(self._ready, bucket, rank))

    def run(self) -> float:
        """Seconds until all ranks have all averages."""
        while self._agenda:
            now, _, call = heapq.heappop(self._agenda)
            call(now)
        return self.end

    def _later(self, at: float, call: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (at, self._number, call))

    def _ready(self, bucket: int, rank: int, now: float) -> None:
        """Send shares in turns; in each turn a rank sends to one rank and receives from one."""
        self._contributed(now, bucket, rank)
        for distance in range(1, self._ranks):
            self._send(now, (True, bucket, rank, (rank + distance) % self._ranks))

    def _contributed(self, now: float, bucket: int, owner: int) -> None:
        self._left[bucket, owner] -= 1
        if not self._left[bucket, owner]:
            self._later(now + OWNER, partial(self._results, bucket, owner))

    def _results(self, bucket: int, owner: int, now: float) -> None:
        for distance in range(1, self._ranks):
            self._send(now, (False, bucket, owner, (owner + distance) % self._ranks))

    def _send(self, now: float, order: Order) -> None:
        if self._rule:
            self._later(now + self._links.grant, partial(self._asked, order))
            return
        source = order[2]
        self._out[source] = max(now, self._out[source]) + self._links.message
        self._later(self._out[source], partial(self._sent, order))

    def _sent(self, order: Order, now: float) -> None:
        """The other end takes the message meanwhile, unless it is busy with others' messages."""
        target = order[3]
        self._in[target] = max(now, self._in[target] + self._links.message)
        self._later(self._in[target] + self._links.latency, partial(self._there, order))

    def _asked(self, order: Order, now: float) -> None:
        heapq.heappush(self._waiting, order)
        self._grant(now)

    def _grant(self, now: float) -> None:
        """Start the first messages in order whose two ends are free."""
        kept: list[Order] = []
        for order in sorted(self._waiting):
            source, target = order[2:]
            if max(self._out[source], self._in[target]) > now:
                kept.append(order)
                continue
            end = self._out[source] = self._in[target] = now + self._links.message
            self._later(end + self._links.latency, partial(self._there, order))
            self._later(end, self._grant)
        self._waiting = kept

    def _there(self, order: Order, now: float) -> None:
        self.end = max(self.end, now)
        if order[0]:
            self._contributed(now, order[1], order[3])


def seconds(ready: Ready, links: Links, coordinated: bool) -> float:
    """Seconds until all ranks have all averages."""
    return _Run(ready, links, coordinated).run()


def readiness(ranks: int, slower: float, draw: random.Random) -> Ready:
    """Ready times: a random rank is slower; all vary a little by step and bucket."""
    slow, found = draw.randrange(ranks), []
    for rank in range(ranks):
        pace = BACKWARD / BUCKETS * (1 + slower * (rank == slow))
        spent, times = 0.0, []
        for _ in range(BUCKETS):
            spent += pace * draw.uniform(0.9, 1.1)
            times.append(spent)
        found.append(times)
    return found


def compare(ranks: int, slower: float, wire: float, steps: int = STEPS) -> tuple[float, ...]:
    """Mean seconds of a step: as it is, coordinated, and by a free coordinator."""
    message = wire * BACKWARD / (2 * (ranks - 1) * BUCKETS)
    ways = [
        (Links(message, LATENCY), False),
        (Links(message, LATENCY, 2 * LATENCY), True),
        (Links(message, LATENCY), True),
    ]
    draw = random.Random(0)
    every = [readiness(ranks, slower, draw) for _ in range(steps)]
    return tuple(statistics.fmean(seconds(each, *way) for each in every) for way in ways)


def main(steps: Annotated[int, typer.Option(help="simulated steps")] = STEPS) -> None:
    """Print a line per cluster: ms of a step, and the gain of a coordinator."""
    print("ranks slower wire   as it is  coordinated    free")
    for ranks in RANKS:
        for slower in SLOWER:
            for wire in WIRE:
                own, other, free = compare(ranks, slower, wire, steps)
                gains = f"{1 - other / own:+11.1%} {1 - free / own:+7.1%}"
                print(f"{ranks:5} {slower:6.0%} {wire:4} {own * 1e3:8.1f} ms {gains}", flush=True)


if __name__ == "__main__":
    typer.run(main)
