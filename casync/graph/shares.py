"""Owners of the elements of a model: shares of its tensors, by bytes.

[Note: parts do not move] DDP delivers one bucket in the first step and other buckets from the
second on. Residuals at the aggregators must stay in place, so shares depend only on the model and
the world size, never on the bucket. The bucket only decides which of an owner's shares travel in
one message.

[Note: how large a share is] Among N ranks a share is 2(N-1) messages, each of which costs some 50
microseconds whatever its bytes, as much as a payload of 60 KB at 10 Gbit/s. So a tensor is spread
over all owners only if each gets LEAST_BYTES of its gradient. The others form a line, in the
model's order, which is cut into equal shares; owners take these in turn, equally many each, so that
over a step all owners have equal work, and neighbours in a bucket have different owners. A cut that
would leave a crumb of a tensor moves to the tensor's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from casync.codec import FLOAT_BYTES

__all__ = ["LEAST_BYTES", "SMALL_BYTES", "Share", "Shares", "share_out", "shares_alone"]

LEAST_BYTES = 512 << 10  # least gradient bytes of a share, if the model is large enough
SMALL_BYTES = 64 << 10  # least gradient bytes of a share, of any model
_CRUMBS = 16  # a cut leaves at least 1/16 of a share

#: first element in the tensor, and the owner's turn
Share: TypeAlias = tuple[int, int]
#: shares of a tensor, in order; () spreads it over all owners evenly
Shares: TypeAlias = tuple[Share, ...]


@dataclass(frozen=True)
class _Line:
    """The line of all tensors that are not spread over all owners. In elements."""

    share: int
    owners: int

    def cut(self, at: int, length: int) -> Shares:
        """Shares of a tensor of `length` elements at position `at` of the line."""
        crumb = self.share // _CRUMBS
        first, last = at + crumb, at + length - crumb
        if first >= last:
            return ((0, self._turn(at + length // 2)),)
        inside = range(-(-first // self.share) * self.share, last, self.share)
        return ((0, self._turn(first)), *((cut - at, self._turn(cut)) for cut in inside))

    def _turn(self, place: int) -> int:
        return place // self.share % self.owners


def share_out(
    lengths: Sequence[int], owners: int, least_bytes: int = LEAST_BYTES
) -> tuple[Shares, ...]:
    """Shares of every tensor of a model. lengths: elements, in the model's order."""
    return tuple(_shares(lengths, owners, max(1, least_bytes // FLOAT_BYTES)))


def _shares(lengths: Sequence[int], owners: int, least: int) -> Iterator[Shares]:
    wide = owners * least
    together = sum(n for n in lengths if n < wide)
    each = -(-together // (owners * max(1, together // wide)))
    line, at = _Line(max(each, min(least, SMALL_BYTES // FLOAT_BYTES), 1), owners), 0
    for length in lengths:
        if length >= wide:
            yield ()
        else:
            yield line.cut(at, length)
            at += length


def shares_alone(length: int, turn: int, owners: int, least_bytes: int) -> Shares:
    """Shares of a single tensor, without its model, beginning with the owner of `turn`."""
    count = max(1, length * FLOAT_BYTES // max(1, least_bytes))
    if count >= owners > 1:
        return ()
    return tuple((length * i // count, (turn + i) % owners) for i in range(min(count, owners)))
