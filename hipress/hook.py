"""The communication hook that DDP calls for every bucket.

No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.
"""

import inspect
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable

from hipress.engine import Engine, average
from hipress.errors import SyncError


class HookState:
    """What DDP keeps for us. Must not refer to the DDP module: C++ holds it, so the cycle would
    never be collected. A parameter is known by identity, whatever bucket it is in."""

    def __init__(self, home: dist.ProcessGroup, *, delayed: bool = False) -> None:
        self.home = home
        self.index: dict[torch.Tensor, int] = {}
        self.engine: Engine | None = None  # None after detach: plain averaging
        self.watched = -1  # autograd's number of the backward pass that will call `finish`
        # With static_graph the first step's buckets come, all at once, when all else is done.
        self.delayed = delayed

    def serve(self, engine: Engine, parameters: Sequence[nn.Parameter]) -> None:
        """Synchronize by this engine, to which parameters are known by their position."""
        self.engine = engine
        self.index = {parameter: i for i, parameter in enumerate(parameters)}

    def __reduce__(self) -> tuple[object, ...]:
        """Nothing: a copied or pickled DDP module gets a reducer of its own, without our hook."""
        return HookState, (None,)


def gradient_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket."""
    _refuse_python_reducer(bucket)
    engine = state.engine
    if engine is None:
        return average(bucket.buffer(), state.home)
    try:
        engine.begin(bucket.index())
        _at_end_of_backward(state, engine)
        future = engine.reduce(_indices(state, bucket), bucket.buffer(), last=bucket.is_last())
    except BaseException as error:  # a KeyboardInterrupt, too
        engine.abandon(SyncError(f"{type(error).__name__}: {error}"))
        raise
    if bucket.is_last() and (state.delayed or state.watched < 0):
        engine.finish()  # nothing will call it before DDP itself waits
        state.delayed = False
    return future


def _indices(state: HookState, bucket: GradBucket) -> tuple[int, ...]:
    try:
        return tuple(state.index[parameter] for parameter in bucket.parameters())
    except KeyError:
        raise SyncError(
            "a bucket holds a parameter that was frozen or replaced before hipress was attached; "
            "do that before DistributedDataParallel is made, or freeze after hipress.attach"
        ) from None


def in_backward() -> bool:
    """Whether autograd is running, in this thread."""
    return torch._C._current_graph_task_id() >= 0


def _refuse_python_reducer(bucket: object) -> None:
    if not isinstance(bucket, GradBucket):
        raise SyncError(PYTHON_REDUCER)


PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp = "python_reducer" hands gradients to hooks one by one '
    "and ignores what they return, so ranks would drift apart without an error. Set it to True "
    "(the default) before the model is wrapped."
)


def _at_end_of_backward(state: HookState, engine: Engine) -> None:
    """Have autograd call `engine.finish` when it has run all nodes, before DDP's own callback.

    Once for each backward pass with buckets of the step: there may be several, one within another
    (checkpoint with use_reentrant=True) or one after another. In DDP's `join` a rank without data
    calls hooks outside of any.
    """
    task = torch._C._current_graph_task_id()
    if task >= 0 and task != state.watched:
        Variable._execution_engine.queue_callback(engine.finish)
    state.watched = task


# DDP takes only a real function with this parameter; fail here rather than there.
assert "bucket" in inspect.signature(gradient_hook).parameters
