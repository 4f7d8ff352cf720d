"""Compressed gradient synchronization as a graph of tasks: planned, checked, simulated, run.

::

    parts = partition(tensors, choices, world_size, codecs)    # what travels together
    graph = build(parts, world_size, codecs)                   # tasks of all ranks
    dry_run(graph)                                             # cannot deadlock; counts bytes
    program = graph.slice(rank)
    executor = Executor(transport, codecs, seed=0, timeout=60.0)
    future = executor.submit(program, bucket, states, step)    # bucket becomes the average

`casync.predict.simulate` predicts times, `casync.predict.cost` has the formulas of SeCoPa.
Names are loaded when first used: importing this package imports neither torch nor networkx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.errors import (
        CasyncError,
        DeadlockError,
        ExecutorClosed,
        GraphSyntaxError,
        PayloadError,
        PeerTimeout,
        PlanError,
        TransportAborted,
        TransportError,
    )
    from casync.graph.dryrun import DryRun, dry_run
    from casync.graph.graph import Graph, Program, build
    from casync.graph.plan import Choice, Part, Tensor, assign_owners, partition
    from casync.runtime.executor import Executor

_HOME = {
    "codec": ("Codec",),
    "graph.dryrun": ("DryRun", "dry_run"),
    "errors": (
        "CasyncError",
        "DeadlockError",
        "ExecutorClosed",
        "GraphSyntaxError",
        "PayloadError",
        "PeerTimeout",
        "PlanError",
        "TransportAborted",
        "TransportError",
    ),
    "runtime.executor": ("Executor",),
    "graph.graph": ("Graph", "Program", "build"),
    "graph.plan": ("Choice", "Part", "Tensor", "assign_owners", "partition"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "CasyncError",
    "Choice",
    "Codec",
    "DeadlockError",
    "DryRun",
    "Executor",
    "ExecutorClosed",
    "Graph",
    "GraphSyntaxError",
    "Part",
    "PayloadError",
    "PeerTimeout",
    "PlanError",
    "Program",
    "Tensor",
    "TransportAborted",
    "TransportError",
    "assign_owners",
    "build",
    "dry_run",
    "partition",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)
    globals()[name] = value
    return value
