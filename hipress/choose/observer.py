"""Observation of the first steps: times at which gradients are ready, and lengths of payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from casync.codec import FLOAT_BYTES, Codec, one_piece
from casync.memory import Memory, Moment
from casync.memory.repeat_elision import MARK, promises, squeeze
from hipress.choose.plan_controller import StepEvent
from hipress.choose.workload import Bucket, Workload, kinds
from hipress.codecs import state_of
from hipress.model.params import Param

RUNS, RUN = 16, 1 << 14  # number and elements of the runs sampled from a large gradient
WORD = 8  # bytes


@dataclass
class _Record:
    """Moments of one step."""

    begun: Moment  # first bucket ready
    buckets: list[tuple[tuple[int, ...], Moment]] = field(default_factory=list)
    marks: dict[StepEvent, Moment] = field(default_factory=dict)
    next: Moment | None = None  # first bucket of the next step

    def seconds(self, moment: Moment | None) -> float:
        """Seconds from the step's first bucket to a moment."""
        return 0.0 if moment is None else moment.since(self.begun)


class Observer:
    """A StepObserver of steps with one plan. All ranks must call `workload` alike."""

    def __init__(self, params: Sequence[Param], memory: Memory) -> None:
        """memory: of gradients as they are compressed."""
        self._params, self._memory = params, memory
        self._kinds = kinds([param for param in params if param.compressible and param.numel])
        self._first = {kind[0].index for kind in self._kinds}
        self._samples: dict[int, torch.Tensor] = {}  # of the latest step, by parameter
        self._records: list[_Record] = []

    @property
    def steps(self) -> int:
        """Number of observed steps, without the current one."""
        return max(0, len(self._records) - 1)

    def begin(self) -> None:
        """Note that a step's first bucket is ready."""
        now = self._memory.moment()
        if self._records:
            self._records[-1].next = now
        self._records.append(_Record(now))

    def observe(
        self, indices: Sequence[int], buffer: torch.Tensor, undelivered: Callable[[], torch.Tensor]
    ) -> None:
        """Implements StepObserver.observe."""
        self._records[-1].buckets.append((tuple(indices), self._memory.moment()))
        if buffer.is_sparse:
            return
        pieces = torch.split(buffer, [self._params[index].reals for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            if index in self._first:
                self._samples[index] = _sample(piece)

    def mark(self, event: StepEvent) -> None:
        """Implements StepObserver.mark."""
        self._records[-1].marks[event] = self._memory.moment()

    def workload(
        self, agree: Callable[[list[float]], list[float]], codecs: Mapping[str, Codec]
    ) -> Workload:
        """A step on the slowest rank, with the longest payloads of any. agree: returns the largest
        of each value over the ranks."""
        latest = self._records[-2]
        alike = [each for each in self._records[:-1] if _shape(each) == _shape(latest)]
        ready = [min(times) for times in zip(*map(_times, alike), strict=True)]
        steps = [each.seconds(each.next) for each in alike]
        ends = [each.seconds(each.marks.get(StepEvent.AVERAGED)) for each in alike]
        rests = [step - end for step, end in zip(steps, ends, strict=True)]
        pairs = [(key, kind) for key in codecs for kind in self._kinds]
        with self._memory.current():
            lengths = [
                _rate(codecs[key], self._samples.get(kind[0].index), self._memory)
                for key, kind in pairs
            ]
        agreed = agree([*ready, max(0.0, min(rests)), min(steps), *lengths])
        *times, backward = agreed[: len(ready)]
        rest, step, *lengths = agreed[len(ready) :]
        buckets = [Bucket(i, t) for (i, _), t in zip(latest.buckets, times, strict=True)]
        payloads = {
            (key, param.index): length
            for (key, kind), length in zip(pairs, lengths, strict=True)
            for param in kind
            if length > 0
        }
        return Workload(tuple(buckets), backward, rest, step, payloads)


def _shape(record: _Record) -> list[tuple[int, ...]]:
    return [indices for indices, _ in record.buckets]


def _times(record: _Record) -> list[float]:
    """Seconds at which each bucket was ready, and at which the backward pass was over."""
    ready = [record.seconds(moment) for _, moment in record.buckets]
    return [*ready, max([record.seconds(record.marks.get(StepEvent.BACKWARD_OVER)), *ready])]


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """A copy of evenly spread runs of a gradient; of a small one, all of it."""
    size = gradient.numel()
    if size > RUNS * RUN:
        step = size // RUNS // RUN * RUN
        gradient = gradient[: step * RUNS].view(RUNS, step)[:, :RUN]
    return gradient.detach().to(torch.float32, copy=True).view(-1)


def _rate(codec: Codec, gradient: torch.Tensor | None, memory: Memory) -> float:
    """Payload bytes that travel per gradient byte; 0 if unknown."""
    if gradient is None or codec.rounds or not codec.suits(gradient.numel()):
        return 0.0
    count = gradient.numel()
    room = -(-codec.payload_bytes(count) // WORD) * WORD
    out, (table, at) = memory.zeros(room, torch.uint8), one_piece(count)
    state = state_of(codec, memory, count) or None
    x, payload = memory.array(gradient), memory.array(out)
    length = int(memory.tensor(codec.encode_batch(x, table, payload, at, state=state))[0])
    message = out[: -(-length // WORD) * WORD].cpu().numpy()
    left = 0
    if promises(message):
        left = squeeze(message, np.zeros(len(message) + MARK, np.uint8))
    return (left or length) / (FLOAT_BYTES * count)
