"""The workload of a step: gradients to synchronize, the times at which they are ready, and lengths
of payloads; as estimated, or as observed in the first steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from casync.codec import FLOAT_BYTES, Codec, one_piece
from casync.memory import Memory, Moment
from casync.memory.repeat_elision import MARK, promises, squeeze
from hipress.choose.chooser import StepEvent
from hipress.codecs import state_of
from hipress.model.params import Param

ALONE = 8  # number of largest tensors that may each get a codec of their own
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: DDP's defaults
RUNS, RUN = 16, 1 << 14  # number and elements of the runs sampled from a large gradient
WORD = 8  # bytes


@dataclass(frozen=True)
class TimedBucket:
    """Gradients that are handed over together."""

    indices: tuple[int, ...]  # of parameters
    ready: float  # seconds of the backward pass since the first bucket


@dataclass(frozen=True)
class Workload:
    """The workload of a step. Seconds since the first bucket is ready."""

    buckets: tuple[TimedBucket, ...]
    backward: float = 0.0  # end of the backward pass
    rest: float = 0.0  # from then to the next step's first bucket: optimizer, forward pass
    step: float = 0.0  # whole step with the native all-reduce; 0 if not measured
    # measured payload bytes per gradient byte, by codec and parameter; a missing parameter has
    # those of its kind (see `kinds`)
    payloads: Mapping[tuple[str, int], float] = field(default_factory=dict)


def estimate(params: Sequence[Param]) -> Workload:
    """The expected buckets of DDP, for a step that takes no time without communication."""
    return timed([*reversed(params)], [0.0] * len(params), 0.0)


def timed(params: Sequence[Param], ready: Sequence[float], forward: float) -> Workload:
    """The buckets of DDP after the first step, filled as gradients become ready.

    params: in the order of the backward pass.
    ready: seconds at which each is ready, from its beginning.
    forward: seconds of the forward pass and all else.
    """
    buckets = [
        TimedBucket(tuple(params[i].index for i in members), max(ready[i] for i in members))
        for members in ddp_buckets([p.nbytes for p in params])
    ]
    if not buckets:
        return Workload((), 0.0, forward)
    first = buckets[0].ready
    shifted = tuple(TimedBucket(each.indices, each.ready - first) for each in buckets)
    return Workload(shifted, ready[-1] - first, forward + first)


def ddp_buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Positions of gradients by bucket; a bucket is closed when it is full. sizes: bytes."""
    bucket: list[int] = []
    size, limit = 0, FIRST_BUCKET
    for position, bytes_ in enumerate(sizes):
        bucket.append(position)
        size += bytes_
        if size >= limit:
            yield bucket
            bucket, size, limit = [], 0, BUCKET
    if bucket:
        yield bucket


def kinds(params: Sequence[Param]) -> list[tuple[Param, ...]]:
    """Parameters that share a choice, most elements first: the largest alone, others by length."""
    order = sorted(params, key=lambda p: -p.numel)
    others: dict[int, list[Param]] = defaultdict(list)
    for param in order[ALONE:]:
        others[param.numel].append(param)
    grouped = [*((param,) for param in order[:ALONE]), *map(tuple, others.values())]
    return sorted(grouped, key=lambda kind: -sum(p.numel for p in kind))


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
    """Observes steps with one plan. All ranks must call `workload` alike."""

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

    def observe(self, indices: Sequence[int], buffer: torch.Tensor) -> None:
        """Take a ready bucket of the step."""
        self._records[-1].buckets.append((tuple(indices), self._memory.moment()))
        if buffer.is_sparse:
            return
        pieces = torch.split(buffer, [self._params[index].reals for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            if index in self._first:
                self._samples[index] = _sample(piece)

    def mark(self, event: StepEvent) -> None:
        """Note that the step is there."""
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
        buckets = [TimedBucket(i, t) for (i, _), t in zip(latest.buckets, times, strict=True)]
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
