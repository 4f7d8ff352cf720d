"""What comes after what, on streams: which events need no waiting for. See [Note: streams]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from casync.memory import Event, Stream

__all__ = ["Lane", "Mark"]


@dataclass(frozen=True, slots=True)
class Mark:
    """Where something ends on a stream, and what is known to come before."""

    lane: object
    number: int  # later ones are larger, on all streams
    event: Event
    known: dict[object, int]  # by lane: the last mark that this one comes after


class Lane:
    """A stream, and the last marks of others that it comes after."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.known: dict[object, int] = {}

    def after(self, marks: Iterable[Mark | None]) -> None:
        """What comes next waits for these. Late ones first: early ones are often known by them."""
        there = {mark.number: mark for mark in marks if mark is not None}
        for number, mark in sorted(there.items(), reverse=True):
            if mark.lane is not self and self.known.get(mark.lane, -1) < number:
                self._stream.after(mark.event)
                news = {**mark.known, mark.lane: number}
                self.known = {
                    lane: max(news.get(lane, -1), self.known.get(lane, -1))
                    for lane in news.keys() | self.known.keys()
                }

    def run(self, work: Callable[[], object]) -> None:
        """See Stream."""
        self._stream.run(work)

    def mark(self, number: int, event: Event) -> Mark:
        """The end of what is there."""
        self._stream.record(event)
        return Mark(self, number, event, self.known)
