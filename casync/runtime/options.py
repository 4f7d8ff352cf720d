"""Options of an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto

__all__ = ["Capture", "RunOptions"]


class Capture(Enum):
    """Uses of CUDA graphs in a run, all ranks alike: see [Note: capture] in capture.py."""

    NEVER = auto()  # give the program's graph up
    MAKE = auto()  # a graph, if possible, and issue the tasks one by one
    LAUNCH = auto()  # the graph, made now if need be


@dataclass(frozen=True)
class RunOptions:
    """Options of an executor, for as long as it lives."""

    seed: int = 0  # of stochastic codecs
    timeout: float = 300.0  # seconds that a peer may take
    #: notice within seconds that a peer is gone, also amid a message. It takes a thread per peer,
    #: and close() breaks the transport's connections.
    watch: bool = False
    #: with `watch`: True for a peer whose part of what this rank waits for is done, though its
    #: connections have ended; the rest of a native reduce may come through others, however late
    finished: Callable[[int], bool] = lambda peer: False
    #: states, by codec, that wait while the input of an encode is zero: [Note: deferred feedback]
    deferred: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: send a CRC-32 with every message; a damaged message raises PayloadError. Native reduces have
    #: none.
    checksum: bool = False
    #: without tags, the host may wait within a step for lengths: see [Note: lengths that vary]
    waits: bool = False
    owns: bool = False  # close() also closes the transport; otherwise that is up to the caller
    epoch: int = 0  # of the ranks, the same on all of them: see [Note: identity]
    #: for profilers: called with verb and codec of each task that computes or waits for a message,
    #: in its thread; the returned context is entered meanwhile
    span: Callable[[str], AbstractContextManager[object]] = nullcontext
    #: for tests that expose missing waits: called with the text of each task in its lane before the
    #: task takes effect
    delay: Callable[[str], None] | None = None
    bulk: bool = True  # tasks share calls of their codecs: see [Note: bulk]; False is for tests
