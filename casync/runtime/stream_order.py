"""Order of events on streams, to leave out needless waits. See [Note: streams]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from casync.memory import Event, Stream

__all__ = ["Lane", "Mark"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point on a stream, and the points that are known to come before it."""

    lane: object
    number: int  # later ones are larger, on all streams
    event: Event
    known: dict[object, int]  # by lane: number of the last mark before this one


class Lane:
    """A stream, and the last marks of other lanes that precede its next work."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.known: dict[object, int] = {}

    def after(self, marks: Iterable[Mark | None]) -> None:
        """Make later work wait for these marks; late ones first, as they often imply early ones."""
        there = {mark.number: mark for mark in marks if mark is not None}
        for number, mark in sorted(there.items(), reverse=True):
            if mark.lane is not self and self.known.get(mark.lane, -1) < number:
                self._stream.after(mark.event)
                known = self.known.copy()  # marks refer to the old one
                for lane, before in (*mark.known.items(), (mark.lane, number)):
                    if known.get(lane, -1) < before:
                        known[lane] = before
                self.known = known

    def forget(self, lane: object) -> None:
        """Forget marks of a lane for which nothing later waits, so that `known` stays short."""
        if lane in self.known:
            self.known = {other: number for other, number in self.known.items() if other != lane}

    def run(self, work: Callable[[], object]) -> None:
        """Implements Stream.run."""
        self._stream.run(work)

    def mark(self, number: int, event: Event) -> Mark:
        """A mark at the present end of the stream."""
        self._stream.record(event)
        return Mark(self, number, event, self.known)
