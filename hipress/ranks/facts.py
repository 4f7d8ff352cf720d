"""Comparison of the facts in which ranks must be equal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hipress.errors import ConfigMismatch


def compare(posted: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Raise ConfigMismatch for the first fact on which a rank differs from the group's first."""
    for other in range(1, len(posted)):
        for key in sorted({*posted[0], *posted[other]}, key=_order):
            left, right = posted[0].get(key), posted[other].get(key)
            if key == "digests":
                sides = left or {}, right or {}
                # names and paths of specs may differ between ranks
                if sorted(sides[0].values()) != sorted(sides[1].values()):
                    raise ConfigMismatch(_other_text(*sides, ranks[0], ranks[other]))
            elif left != right:
                what, mine, yours = _narrow(key, left, right)
                raise ConfigMismatch(
                    f"ranks disagree on {what}: rank {ranks[0]}: {mine}, "
                    f"rank {ranks[other]}: {yours}"
                )


def _other_text(left: Mapping[str, str], right: Mapping[str, str], one: int, other: int) -> str:
    """Message for a codec whose text or parameters differ between two ranks."""
    name = min(n for n in {*left, *right} if left.get(n) != right.get(n))
    digests = " and ".join(str(side.get(name, "none"))[:12] for side in (left, right))
    return (
        f"{name} differs between ranks {one} and {other} (digests {digests}); "
        "give every rank the same text and parameters"
    )


def _order(key: str) -> tuple[bool, bool, str]:
    """Sort key: the codec, which readers recognize best; then options, digests and the plan."""
    return (key != "compressor", key in ("digests", "plan"), key)


def _narrow(key: str, left: Any, right: Any) -> tuple[str, str, str]:
    """Name and both values of a difference; of two lists only the first entry that differs."""
    if not (isinstance(left, list) and isinstance(right, list)):
        return key, str(left), str(right)
    for index, (mine, yours) in enumerate(itertools.zip_longest(left, right)):
        if mine != yours:
            absent = "nothing"
            return f"{key}, entry {index}", str(mine or absent), str(yours or absent)
    return key, str(left), str(right)
