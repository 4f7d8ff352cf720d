"""A program's run, captured once and then launched as a whole: a CUDA graph.

[Note: capture] The first run of a program makes its buffers, the second is captured, and each later
run is launched. All ranks launch in the same steps, as NCCL requires; so a program is captured only
if no length varies and the host computes nothing from the step. Capturing launches nothing, so with
Capture.MAKE a rank where it fails goes on, and ranks can agree before they launch. Steps are
counted in device memory. A bucket at another address than the captured one is copied there and
back. If states have moved, for example after a state was loaded, a run is captured again; a run
without capture gives the graph up. Graphs of a rank run one after another on a stream of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

import torch

from casync.codec import Codec, DeviceCodec
from casync.graph.graph import Program
from casync.memory import Memory
from casync.runtime.counters import Counters
from casync.runtime.lanes import Job
from casync.runtime.options import Capture
from casync.runtime.streams import StreamLanes

__all__ = ["Captures", "capture_obstacle"]

_log = logging.getLogger("casync")
_COUNTED = (
    "bytes_sent", "bytes_received", "bytes_reduced",
    "messages_sent", "messages_received", "reduces",
)  # fmt: skip


@dataclass(frozen=True)
class _Graph:
    """A captured run. Its job keeps the bucket and the states that the graph uses."""

    job: Job
    key: tuple[int, ...]  # identities of the state arrays
    launch: Callable[[], None]  # in the current stream
    tick: torch.Tensor  # int64 [1]: steps since the capture
    counts: dict[str, int]  # amounts that a run adds to counters


class Captures:
    """The captured programs of an executor. See [Note: capture]."""

    def __init__(
        self, memory: Memory, lanes: StreamLanes, counters: Counters, lock: threading.Lock
    ) -> None:
        """lock: of the counters."""
        self._memory, self._lanes, self._counters, self._lock = memory, lanes, counters, lock
        # not by Prepared, which a graph's job keeps: entries would never be dropped
        self._graphs: WeakKeyDictionary[Program, _Graph] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Program, tuple[int, ...]] = WeakKeyDictionary()
        self._warned: set[str] = set()  # reasons why programs are not captured

    def uses_graph(self, program: Program, job: Job, capture: Capture) -> bool:
        """True if the job's program has to be captured, or its graph launched, by these rules."""
        key = _key(job)
        seen, self._seen[program] = self._seen.get(program), key
        if capture is Capture.NEVER:
            self._graphs.pop(program, None)
            return False
        why = capture_obstacle(job.prepared.codecs)
        if why and why not in self._warned:
            self._warned.add(why)
            _log.warning("capture: %s, so its tasks are launched one by one", why)
        return (
            not why
            and seen == key
            and not (capture is Capture.MAKE and self.has_graph(program, job))
        )

    def has_graph(self, program: Program, job: Job) -> bool:
        """True if there is a graph with the job's states."""
        graph = self._graphs.get(program)
        return graph is not None and graph.key == _key(job)

    def make(self, program: Program, job: Job, issue: Callable[[], None]) -> None:
        """Capture what `issue` issues: the tasks of a job that is only for this."""
        before = [getattr(self._counters, name) for name in _COUNTED]
        tick = self._memory.zeros(1, torch.int64)
        try:
            with ExitStack() as stack, self._lanes.capturing(job):
                for codec in cast(list[DeviceCodec], list(job.prepared.codecs.values())):
                    stack.enter_context(codec.ticking(self._memory.array(tick)))

                def whole() -> None:
                    issue()
                    self._lanes.join(job)

                launch = self._memory.capture(whole)
        finally:  # nothing was sent
            counts = self._take_back(before)
        self._graphs[program] = _Graph(job, _key(job), launch, tick, counts)

    def launch(self, program: Program, job: Job, complete: Callable[[], None]) -> None:
        """Launch the program's graph for a job, whose bucket may have another address."""
        graph = self._graphs[program]
        with self._lock:
            for name, more in graph.counts.items():
                setattr(self._counters, name, getattr(self._counters, name) + more)
        there, here = graph.job.bucket.detach(), job.bucket.detach()
        moved = there.data_ptr() != here.data_ptr()

        def begin() -> None:
            graph.tick.fill_(job.inputs.step - graph.job.inputs.step)
            if moved:
                self._memory.copy(there, here)

        work = [begin, graph.launch]
        if moved:
            work.append(partial(self._memory.copy, here, there))
        self._lanes.admit(job)
        self._lanes.launch(job, work, complete)

    def _take_back(self, before: list[int]) -> dict[str, int]:
        """Set counters back; return what was counted since."""
        with self._lock:
            counts = {}
            for name, old in zip(_COUNTED, before, strict=True):
                counts[name] = getattr(self._counters, name) - old
                setattr(self._counters, name, old)
        return counts


def _key(job: Job) -> tuple[int, ...]:
    return tuple(id(array) for state in job.inputs.states.values() for array in state.values())


def capture_obstacle(codecs: Mapping[str, Codec]) -> str:
    """The reason why programs with these codecs, by key, cannot be captured; "" if they can."""
    lengths = sorted(key for key, codec in codecs.items() if not codec.fixed)
    steps = sorted(key for key, codec in codecs.items() if not cast(DeviceCodec, codec).repeats)
    if lengths:
        return f"the lengths of {' and '.join(lengths)} vary"
    return f"the host computes parameters of {' and '.join(steps)} in each step" if steps else ""
