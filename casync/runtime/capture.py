"""A program's run, captured once and then launched as a whole: a CUDA graph.

[Note: capture] The first run of a program makes its buffers, the second is captured and launched,
and each later run is launched. All ranks do so in the same steps, as NCCL requires; so a program is
captured only if no length varies and the host computes nothing from the step. Steps are counted in
device memory. A bucket at another address than the captured one is copied there and back. If states
have moved, for example after a state was loaded, a run is captured again. Graphs of a rank run one
after another on a stream of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
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
from casync.runtime.streams import StreamLanes

__all__ = ["Captures"]

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
        self._told: set[str] = set()  # reasons why programs are not captured

    def takes(self, program: Program, job: Job) -> bool:
        """True if `run` must be called for the job, instead of issuing its tasks one by one."""
        seen, key = self._seen.get(program), _key(job)
        why = _prevents(job) if seen is None else ""
        if why:
            if why not in self._told:
                self._told.add(why)
                _log.warning("capture: %s, so its tasks are launched one by one", why)
            return False
        self._seen[program] = key
        return seen == key

    def run(
        self, program: Program, job: Job, issue: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        """Launch a job's run, after capturing it if needed; `issue` issues its tasks."""
        graph = self._graphs.get(program)
        if graph is None or graph.key != _key(job):
            graph = self._graphs[program] = self._capture(job, issue)
        else:
            with self._lock:
                for name, more in graph.counts.items():
                    setattr(self._counters, name, getattr(self._counters, name) + more)
        self._lanes.admit(job)
        self._lanes.launch(job, partial(self._again, graph, job), complete)

    def _capture(self, job: Job, issue: Callable[[], None]) -> _Graph:
        before = [getattr(self._counters, name) for name in _COUNTED]
        tick = self._memory.zeros(1, torch.int64)
        with ExitStack() as stack, self._lanes.taking(job):
            for codec in self._codecs(job):
                stack.enter_context(codec.ticking(self._memory.array(tick)))

            def whole() -> None:
                issue()
                self._lanes.join(job)

            launch = self._memory.capture(whole)
        after = [getattr(self._counters, name) for name in _COUNTED]
        counts = {n: b - a for n, a, b in zip(_COUNTED, before, after, strict=True)}
        return _Graph(job, _key(job), launch, tick, counts)

    def _codecs(self, job: Job) -> list[DeviceCodec]:
        return cast(list[DeviceCodec], list(job.prepared.codecs.values()))

    def _again(self, graph: _Graph, job: Job) -> None:
        """Launch the graph in the current stream. The captured bucket may have another address."""
        there, here = graph.job.bucket.detach(), job.bucket.detach()
        moved = there.data_ptr() != here.data_ptr()
        graph.tick.fill_(job.inputs.step - graph.job.inputs.step)
        if moved:
            self._memory.copy(there, here)
        graph.launch()
        if moved:
            self._memory.copy(here, there)


def _key(job: Job) -> tuple[int, ...]:
    return tuple(id(array) for state in job.inputs.states.values() for array in state.values())


def _prevents(job: Job) -> str:
    """The reason why a job's program cannot be captured; "" if it can."""
    lengths = sorted({codec for _, codec, _ in job.prepared.varying})
    steps = sorted(key for key, each in job.prepared.codecs.items() if not _repeats(each))
    if lengths:
        return f"the lengths of {' and '.join(lengths)} vary"
    return f"the host computes parameters of {' and '.join(steps)} in each step" if steps else ""


def _repeats(codec: Codec) -> bool:
    return cast(DeviceCodec, codec).repeats
