"""The recorded spans of a step of this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from casync.building.tasks import (
    Decode,
    DecodeRounds,
    Encode,
    EncodeRound,
    Follow,
    Merge,
    Task,
    members,
)
from casync.runtime.executor import TraceEvent
from hipress import registry
from hipress.errors import ConfigError
from hipress.session import Session
from hipress.tools.tracing.spans import BACKWARD, BUCKET, DECODE, ENCODE, MERGE, WIRE, Span

_WHAT = {
    Encode: ENCODE, EncodeRound: ENCODE, Merge: MERGE, Follow: MERGE,
    Decode: DECODE, DecodeRounds: DECODE,
}  # fmt: skip


def session_of(module: Any) -> Session:
    """The session of a wrapped module; ConfigError for a module that hipress does not compress."""
    session = registry.get(module, Session)
    if session is None or session.engine is None or not isinstance(module, DistributedDataParallel):
        raise ConfigError(
            "hipress trace: this step is not compressed by hipress.wrap: name a method that is, "
            "such as hipress:int4_group"
        )
    return session


def record(module: Any, backward: Callable[[], None]) -> list[Span]:
    """Run a backward pass with its synchronization; return its spans, from its beginning on."""
    engine = session_of(module).engine
    assert engine is not None
    events: list[TraceEvent] = []
    exposed = engine.traffic.exposed_seconds
    engine.trace(events)
    begin = time.perf_counter()
    try:
        backward()
    finally:
        engine.trace(None)
    waited = engine.traffic.exposed_seconds - exposed
    over = time.perf_counter() - begin - waited
    return [Span(BACKWARD, 0.0, over), *_spans(events, begin)]


def _spans(events: Sequence[TraceEvent], start: float) -> Iterator[Span]:
    jobs = sorted({event.job for event in events})
    for event in events:
        bucket, times = jobs.index(event.job), (event.begin - start, event.end - start)
        if event.task is None:
            yield Span(BUCKET, *times, bucket)
        else:
            yield Span(_what(event.task), *times, bucket, event.task.text())


def _what(task: Task) -> str:
    return _WHAT.get(type(members(task)[-1]), WIRE)
