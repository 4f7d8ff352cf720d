"""Ranks compare their configurations before the first gradient moves.

[Note: agreement]
Two ranks that run different codecs would read each other's bytes as nonsense, or wait for ever.
So at attach time each rank writes its configuration, as JSON, into the job's key-value store
(the one of `init_process_group`), and reads everybody else's. No process group is needed, which
is the point: a collective that one rank never joins cannot say who is missing; the store can.
A rank whose own set-up failed writes that failure instead, so the others stop at once rather
than at the time-out.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from hipress.errors import AgreementTimeout, ConfigMismatch, HipressError

FAILED = "failed"


@dataclass(frozen=True)
class Meeting:
    """One place in the store where the ranks of a group compare notes, any number of times."""

    store: Store
    rank: int  # within the group
    ranks: tuple[int, ...]  # global numbers, by rank within the group
    timeout: float  # seconds
    name: str
    _turn: Iterator[int] = field(default_factory=itertools.count)

    def settle(self, facts: Mapping[str, Any]) -> None:
        """Return when every rank posted equal facts.

        Raises ConfigMismatch naming the first differing fact and both sides, or
        AgreementTimeout naming the ranks that never arrived.
        """
        turn = next(self._turn)
        self._post(turn, facts)
        posted = self._collect(turn)
        _compare(posted, self.ranks)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on; they raise as they arrive."""
        self._post(next(self._turn), {FAILED: f"{type(error).__name__}: {error}"})

    def _key(self, turn: int, rank: int) -> str:
        return f"hipress/{self.name}/{turn}/{rank}"

    def _post(self, turn: int, facts: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(facts, sort_keys=True, default=str)
            self.store.set(self._key(turn, self.rank), text)
        except RuntimeError as error:
            raise HipressError(f"the job's store does not answer: {error}") from error

    def _collect(self, turn: int) -> list[dict[str, Any]]:
        """Everybody's facts; polls, because a store's own wait does not say who is missing."""
        deadline = time.monotonic() + self.timeout
        missing = list(range(len(self.ranks)))
        found: dict[int, dict[str, Any]] = {}
        for pause in _pauses():
            for rank in [r for r in missing if self._there(turn, r)]:
                found[rank] = json.loads(self.store.get(self._key(turn, rank)))
                missing.remove(rank)
                _raise_if_failed(found[rank], self.ranks[rank], self.ranks[self.rank])
            if not missing:
                break
            if time.monotonic() > deadline:
                raise AgreementTimeout(self._absent(missing))
            time.sleep(pause)
        return [found[rank] for rank in range(len(self.ranks))]

    def _there(self, turn: int, rank: int) -> bool:
        try:
            return bool(self.store.check([self._key(turn, rank)]))
        except RuntimeError as error:
            raise HipressError(f"the job's store does not answer: {error}") from error

    def _absent(self, missing: Sequence[int]) -> str:
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        return (
            f"rank {self.ranks[self.rank]} waited {self.timeout:g} s for rank {names} of "
            f"{len(self.ranks)}. Every rank must call hipress.wrap or hipress.attach, "
            "the same number of times and in the same order."
        )


def meeting(group: dist.ProcessGroup, timeout: float) -> Meeting:
    """The next meeting of this group's ranks; each rank counts its meetings in the store."""
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank(group)
    place = ",".join(map(str, ranks))
    # A private name, because torch has no public accessor of the job's store.
    store = _get_default_store()
    turn = store.add(f"hipress/{place}/meetings/{rank}", 1)
    return Meeting(store, rank, ranks, timeout, f"{place}/{turn}")


@contextmanager
def announced(group: dist.ProcessGroup) -> Iterator[None]:
    """What fails inside, before this rank's meeting, the others learn at theirs."""
    try:
        yield
    except Exception as error:
        meeting(group, 1.0).fail(error)
        raise


def _pauses() -> Iterator[float]:
    """Short at first, since ranks mostly arrive together, then easy on the store."""
    pause = 0.001
    while True:
        yield pause
        pause = min(pause * 1.5, 0.1)


def _raise_if_failed(facts: Mapping[str, Any], rank: int, here: int) -> None:
    if FAILED in facts:
        raise ConfigMismatch(
            f"rank {rank} could not be set up, so rank {here} stops, too: {facts[FAILED]}"
        )


def _compare(posted: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Raise ConfigMismatch for the first fact on which a rank differs from the group's first."""
    for other in range(1, len(posted)):
        for key in sorted({*posted[0], *posted[other]}, key=_order):
            left, right = posted[0].get(key), posted[other].get(key)
            if key == "digests":
                sides = left or {}, right or {}
                # what a rank calls a spec, or where it found it, does not matter
                if sorted(sides[0].values()) != sorted(sides[1].values()):
                    raise ConfigMismatch(_other_text(*sides, ranks[0], ranks[other]))
            elif left != right:
                what, mine, yours = _narrow(key, left, right)
                raise ConfigMismatch(
                    f"ranks disagree on {what}: rank {ranks[0]}: {mine}, "
                    f"rank {ranks[other]}: {yours}"
                )


def _other_text(left: Mapping[str, str], right: Mapping[str, str], one: int, other: int) -> str:
    """Which codec has another text, or other parameters, on another rank."""
    name = min(n for n in {*left, *right} if left.get(n) != right.get(n))
    digests = " and ".join(str(side.get(name, "none"))[:12] for side in (left, right))
    return (
        f"{name} differs between ranks {one} and {other} (digests {digests}); "
        "give every rank the same text and parameters"
    )


def _order(key: str) -> tuple[bool, bool, str]:
    """What a reader recognizes first: the codec, then options, then digests and the plan."""
    return (key != "compressor", key in ("digests", "plan"), key)


def _narrow(key: str, left: Any, right: Any) -> tuple[str, str, str]:
    """The differing entry when both sides are lists: one parameter, not all of them."""
    if not (isinstance(left, list) and isinstance(right, list)):
        return key, str(left), str(right)
    for index, (mine, yours) in enumerate(itertools.zip_longest(left, right)):
        if mine != yours:
            absent = "nothing"
            return f"{key}, entry {index}", str(mine or absent), str(yours or absent)
    return key, str(left), str(right)
