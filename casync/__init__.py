"""Compressed gradient synchronization as a graph of tasks: planned, predicted, run.

::

    topology = Topology.flat(world_size)                       # or nodes of ranks
    parts = partition(tensors, choices, topology, codecs)      # what travels together
    program = build_program(parts, topology, codecs, rank)     # tasks of this rank
    executor = Executor(transport, codecs, RunOptions(seed=0, timeout=60.0))
    future = executor.submit(program, bucket, states, step)    # bucket becomes the average

`casync.testing.Hub` makes transports between threads; `casync.predict.timeline` predicts times.
docs/how/engine.md begins with a whole example.
Names are loaded when first used: importing this package imports neither torch nor networkx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from casync.building.parts import Choice, Part, Tensor
    from casync.codec import Codec
    from casync.errors import (
        CasyncError,
        DeadlockError,
        ExecutorClosed,
        PayloadError,
        PeerTimeout,
        PlanError,
        TransportAborted,
        TransportError,
    )
    from casync.graph.graph import Graph, Program, build, build_program
    from casync.graph.plan import partition
    from casync.graph.shares import share_out
    from casync.raw import RAW
    from casync.runtime.executor import Executor
    from casync.runtime.options import RunOptions
    from casync.topology import Topology

_HOME = {
    "codec": ("Codec",),
    "errors": (
        "CasyncError",
        "DeadlockError",
        "ExecutorClosed",
        "PayloadError",
        "PeerTimeout",
        "PlanError",
        "TransportAborted",
        "TransportError",
    ),
    "runtime.executor": ("Executor",),
    "runtime.options": ("RunOptions",),
    "graph.graph": ("Graph", "Program", "build", "build_program"),
    "building.parts": ("Choice", "Part", "Tensor"),
    "graph.plan": ("partition",),
    "graph.shares": ("share_out",),
    "topology": ("Topology",),
    "raw": ("RAW",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "RAW",
    "CasyncError",
    "Choice",
    "Codec",
    "DeadlockError",
    "Executor",
    "ExecutorClosed",
    "Graph",
    "Part",
    "PayloadError",
    "PeerTimeout",
    "PlanError",
    "Program",
    "RunOptions",
    "Tensor",
    "Topology",
    "TransportAborted",
    "TransportError",
    "build",
    "build_program",
    "partition",
    "share_out",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)
    globals()[name] = value
    return value
