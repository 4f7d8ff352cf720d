"""Streams of an emulated device: their work runs later, in any legal order."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from casync.errors import DeadlockError
from casync.memory.host import HostMemory
from casync.transports import Member
from tests.casync.rendezvous import Meeting
from tests.patience import HANG

#: of this thread: whether it is a device at work, rather than a host
at_work = threading.local()


class Schedule:
    """All streams of all ranks.

    first, last: streams that are chosen whenever they can be, or only if no other can be; for the
    others each schedule has preferences of its own, or none.
    """

    def __init__(self, seed: int, dropped: int | None = None) -> None:
        """dropped: number of the wait to leave out."""
        self.random = random.Random(seed)
        self.strict = seed % 2 == 0  # always the most preferred, not any
        self.streams: list[FakeStream] = []
        self.waits: list[tuple[FakeStream, FakeEvent]] = []
        self.dropped = dropped
        self.first: FakeStream | None = None
        self.last: FakeStream | None = None
        self.changed = threading.Condition()
        self.driven = False
        self.broken: BaseException | None = None  # error that ended the driving thread

    @contextmanager
    def driving(self) -> Iterator[None]:
        """A context in which a thread runs the queued work, as a device would."""
        self.driven = True
        thread = threading.Thread(target=self._drive, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self.changed:
                self.driven = False
                self.changed.notify_all()
            thread.join()

    def _drive(self) -> None:
        with self.changed:
            try:
                while self.driven:
                    self.run()
                    self.changed.notify_all()
                    self.changed.wait()
            except BaseException as error:
                self.broken = error
                self.changed.notify_all()
                raise

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Wait until work on the streams has brought this about."""
        with self.changed:
            if self.driven:
                self.changed.wait_for(lambda: reached() or self.broken, HANG)
            else:
                self.run(reached)
        assert reached(), f"nothing brings this about: {self.broken!r}"

    def drop(self, stream: FakeStream, event: FakeEvent) -> bool:
        """Count a wait; True if it is the one to leave out."""
        self.waits.append((stream, event))
        if len(self.waits) - 1 != self.dropped:
            return False
        self.first, self.last = stream, event.stream
        return True

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run everything on the streams, or until the condition holds."""
        while not until():
            able = [s for s in self.streams if s.able()]
            if not able:
                if any(s.items for s in self.streams) and not self.driven:
                    raise DeadlockError("streams wait for each other")
                return
            pick = min(able, key=self._rank) if self.strict else self.random.choice(able)
            if self.first in able and self.random.random() < 0.8:
                pick = self.first
            elif pick is self.last and len(able) > 1:
                pick = next(s for s in able if s is not self.last)
            pick.step()

    def _rank(self, stream: FakeStream) -> float:
        return stream.preference


class FakeEvent:
    """An event that is reached when its stream gets there."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stream: FakeStream | None = None  # where it was recorded last
        self.recorded = self.reached = 0

    def done(self) -> bool:
        refuse_capture()
        return self.reached >= self.recorded

    def wait(self) -> None:
        refuse_capture()
        wanted = self.recorded
        self.schedule.wait_for(lambda: self.reached >= wanted)


class FakeMoment:
    """A moment that is reached when the users' stream gets there."""

    def __init__(self, memory: FakeMemory) -> None:
        self.seconds = 0.0
        self.event = memory.event()
        memory.users.run(self._take)
        memory.users.record(self.event)

    def _take(self) -> None:
        self.seconds = time.perf_counter()

    def since(self, earlier: FakeMoment) -> float:
        for moment in (earlier, self):
            moment.event.wait()
        return self.seconds - earlier.seconds


class FakeStream:
    """A queue of closures."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.preference = schedule.random.random()
        self.items: deque[Callable[[], object]] = deque()
        self.pending: Callable[[], bool] | None = None  # condition of the work that has begun
        self.blocked: list[tuple[FakeEvent, int, int]] = []  # event, number, items still before
        self.put = self.taken = 0
        schedule.streams.append(self)

    def after(self, event: FakeEvent) -> None:
        if captured("after", self, event):
            return
        with self.schedule.changed:
            if event.recorded and not self.schedule.drop(self, event):
                self.blocked.append((event, event.recorded, self.put))

    def run(self, work: Callable[[], object]) -> None:
        if captured("run", self, work):
            return
        with self.schedule.changed:
            self.items.append(work)
            self.put += 1
            self.schedule.changed.notify_all()

    def record(self, event: FakeEvent) -> None:
        if captured("record", self, event):
            return
        with self.schedule.changed:
            event.stream = self
            event.recorded += 1
            self.run(partial(setattr, event, "reached", event.recorded))

    def able(self) -> bool:
        """True if the next item may run, or is complete."""
        if self.pending is not None:
            return self.pending()
        waits = [w for w in self.blocked if w[2] <= self.taken]
        return bool(self.items) and all(event.reached >= number for event, number, _ in waits)

    def step(self) -> None:
        self.blocked = [w for w in self.blocked if w[2] > self.taken]
        if self.pending is None:
            at_work.device = True
            try:
                result = self.items[0]()
            finally:
                at_work.device = False
            self.pending = result if callable(result) else None
            if self.pending is not None and not self.pending():
                return
        self.pending = None
        self.items.popleft()
        self.taken += 1


class Graph:
    """Captured work of streams. A launch runs it in any order that the captured waits allow, as one
    item of the stream that launches; codecs count steps from the captured one."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._ticks = schedule, [*getattr(at_work, "ticks", ())]
        self._items: list[tuple[str, FakeStream, object]] = []

    def take(self, what: str, stream: FakeStream, about: object) -> None:
        recorded = [each for name, _, each in self._items if name == "record"]
        assert what != "after" or about in recorded, "a wait for what is not captured"
        self._items.append((what, stream, about))

    def launch(self) -> Callable[[], bool]:
        inner, streams, events = Schedule(self._schedule.random.randrange(200)), {}, {}
        inner.driven = True  # what waits for a peer is no deadlock
        for what, stream, about in self._items:
            there = streams[stream] = streams.get(stream) or FakeStream(inner)
            if what == "run":
                there.run(partial(self._run, about))
            else:
                event = events[about] = events.get(about) or FakeEvent(inner)
                getattr(there, what)(event)

        def done() -> bool:
            inner.run()
            return not any(stream.items for stream in inner.streams)

        return done

    def _run(self, work: Callable[[], object]) -> object:
        with ExitStack() as stack:
            for codec, tick in self._ticks:
                stack.enter_context(codec.ticking(tick))
            return work()


def captured(what: str, stream: FakeStream, about: object) -> bool:
    """Give a call to the graph that this thread captures, if there is one."""
    graph = getattr(at_work, "graph", None)
    if graph is not None:
        graph.take(what, stream, about)
    return graph is not None


def refuse_capture() -> None:
    assert getattr(at_work, "graph", None) is None, "not permitted when a stream is capturing"


class FakeMemory(HostMemory):
    """Host memory whose work runs on fake streams."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.users = FakeStream(schedule)

    def stream(self, *, urgent: bool = False) -> FakeStream:
        return FakeStream(self.schedule)

    def caller(self) -> FakeStream:
        return self.users

    def event(self) -> FakeEvent:
        return FakeEvent(self.schedule)

    def moment(self) -> FakeMoment:
        return FakeMoment(self)

    def capture(self, work: Callable[[], None]) -> Callable[[], Callable[[], bool]]:
        at_work.graph, at_work.capturing = Graph(self.schedule), True
        try:
            work()
            return at_work.graph.launch
        finally:
            at_work.graph = at_work.capturing = None


class FakeEnd:
    """A rank's endpoint: an exchange holds up its stream, not the thread.

    exchanged: called with the rank and the text of each complete transfer.
    """

    def __init__(self, meeting: Meeting, rank: int, exchanged: Callable[[int, str], None]) -> None:
        self.rank, self.world_size, self._meeting = rank, meeting.world_size, meeting
        self._exchanged = exchanged

    def exchange(self, transfers: list[Member]) -> Callable[[], bool]:
        inside = [replace(each, data=getattr(each.data, "inside", each.data)) for each in transfers]
        complete = self._meeting.post(self.rank, inside)
        told: list[str] = []

        def done() -> bool:
            if complete() and not told:
                told.extend(transfer.name for transfer in transfers)
                for name in told:
                    self._exchanged(self.rank, name)
            return complete()

        return done

    def abort(self) -> None:
        self._meeting.leave(self.rank, "gone")

    def close(self) -> None:
        self._meeting.leave(self.rank)


def poison(tensor: torch.Tensor) -> None:
    """Fill memory that must not be read with NaNs and invalid lengths."""
    tensor.view(torch.uint8).fill_(255)
