"""The communication hook that DDP calls for every bucket.

[Note: memory formats] A bucket stores each gradient with the strides that its parameter had when
DDP made the bucket. DDP makes buckets twice: at first, and before the second step, in the order of
the first step. In between a user may call `.to(memory_format=torch.channels_last)`; then codec
states, which have the gradients' layout, are laid out anew, if all ranks did the same. Later
changes do not reach buckets; but DDP reads the tensor that a hook returns with the parameters'
strides at that time.

No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.
"""

import inspect
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress import compat
from hipress.channel.futures import average, map_future
from hipress.compat import GradBucket
from hipress.engine.engine import Engine
from hipress.errors import SyncError
from hipress.model.params import laid_out, layout_of
from hipress.ranks.coordinator import Coordinator


class HookState:
    """State of the hook, kept by DDP. Must not refer to the DDP module: C++ holds it, so the cycle
    would never be collected. Parameters are known by identity, whatever bucket they are in."""

    registered = False  # as in a copied DDP module, whose reducer has no hook

    def __init__(self, ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self.registered = True
        self.ddp = weakref.ref(ddp)
        self.group = group
        self.views = ddp.gradient_as_bucket_view
        self.latest = 0  # number of the last bucket
        self.active_ranks = 0  # in a `join`: ranks with data for the current step
        self.index: dict[torch.Tensor, int] = {}
        self.engine: Engine | None = None  # None after detach: plain averaging
        self.backward_id: int | None = None  # of the backward pass that calls `finish`
        # With static_graph all buckets of the first step come at once, after everything else.
        self.first_step_delayed = ddp.static_graph
        rebuilds = ddp.static_graph or not ddp.find_unused_parameters
        #: until DDP makes its buckets anew; None if it has, or never does
        self.steps_to_rebuild: int | None = 1 if rebuilds else None
        self.coordinator: Coordinator | None = None
        self.strides: dict[torch.Tensor, tuple[int, ...]] = {}  # strides of the present buckets

    def bind(
        self, engine: Engine, parameters: Sequence[nn.Parameter], coordinator: Coordinator
    ) -> None:
        """Synchronize by this engine, which knows parameters by their position."""
        self.engine, self.coordinator = engine, coordinator
        self.index = {parameter: i for i, parameter in enumerate(parameters)}
        self.strides = {p: self.strides.get(p, p.stride()) for p in parameters}
        engine.lay_out(laid_out(engine.params, self.strides.values()))

    def release(self) -> None:
        """Average without an engine from now on."""
        self.engine = None

    def __reduce__(self) -> tuple[object, ...]:
        """An empty state: a copied or pickled DDP module gets a reducer without our hook."""
        return HookState.__new__, (HookState,)


def gradient_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket; the hook that DDP calls."""
    if not isinstance(bucket, GradBucket):
        raise SyncError(PYTHON_REDUCER)
    engine, ddp, task = state.engine, state.ddp(), compat.backward_id()
    before, state.latest = state.latest, bucket.index()
    try:
        if ddp is not None and compat.divides_by_active_ranks(ddp):
            _divide_by_active_ranks(state, bucket)
        if engine is None:
            return _as_read(state, bucket, average(bucket.buffer(), state.group))
        # Buckets come in order, but DDP may leave out the first and the last ones, whose parameters
        # are unused (`skip_all_reduce_unused_params`).
        step = engine.reduction
        if step is None or step.closed or state.latest <= before:
            step = engine.begin(state.index)
        if state.latest == 0 and state.steps_to_rebuild is not None:
            state.steps_to_rebuild -= 1
            if state.steps_to_rebuild < 0:
                _follow_rebuild(state, engine)
        # autograd calls `finish` after all nodes have run, before DDP's own callback; once for each
        # backward pass with buckets of the step: there may be several, one within another
        # (checkpoint with use_reentrant=True) or one after another. In DDP's `join` a rank without
        # data calls hooks outside of any backward pass.
        if task is not None and task != state.backward_id:
            compat.call_after_backward(engine.finish)
        state.backward_id = task
        indices = _indices(state, bucket)
        if state.views and not bucket.buffer().is_sparse:
            _refuse_moved(engine, bucket, indices)
        future = step.reduce(indices, bucket.buffer())
        if bucket.is_last():
            step.close()
    except BaseException as error:  # a KeyboardInterrupt, too
        if engine is not None:
            engine.fail(error)
        raise
    if bucket.is_last() and (state.first_step_delayed or task is None):
        engine.finish()  # nothing will call it before DDP itself waits
        state.first_step_delayed = False
    return _as_read(state, bucket, future)


def _divide_by_active_ranks(state: HookState, bucket: GradBucket) -> None:
    """In a `join` that asks for it: scale so that averaging divides by the active ranks only."""
    if bucket.index() == 0:  # the first one; ranks without data call hooks, too
        has_data = float(compat.backward_id() is not None)
        count = torch.tensor([has_data], device=bucket.buffer().device)
        dist.all_reduce(count, group=state.group)
        state.active_ranks = int(count.item())
    bucket.buffer().mul_(state.group.size() / state.active_ranks)


def _follow_rebuild(state: HookState, engine: Engine) -> None:
    """Adopt the strides of rebuilt buckets: see [Note: memory formats]."""
    state.steps_to_rebuild = None
    assert state.coordinator is not None
    state.strides = {parameter: parameter.stride() for parameter in state.index}
    params = laid_out(engine.params, state.strides.values())
    changed = [str(p) for p, old in zip(params, engine.params, strict=True) if p != old]
    state.coordinator.require_equal({"memory formats of parameters that were changed": changed})
    engine.lay_out(params)


def _as_read(
    state: HookState, bucket: GradBucket, future: torch.futures.Future[torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """Averages in the layout in which DDP reads them: see [Note: memory formats]."""
    buffer, parameters = bucket.buffer(), bucket.parameters()
    same = all(p.stride() == state.strides.get(p, p.stride()) for p in parameters)
    if same or state.views or buffer.is_sparse:
        return future
    strides = [state.strides.get(p, p.stride()) for p in parameters]

    def lay_out(averages: torch.Tensor) -> torch.Tensor:
        pairs = parameters[0].is_complex() and not averages.is_complex()
        numbers = torch.view_as_complex(averages.view(-1, 2)) if pairs else averages
        pieces = torch.split(numbers, [parameter.numel() for parameter in parameters])
        for piece, p, before in zip(pieces, parameters, strides, strict=True):
            whole = piece.as_strided(p.shape, layout_of(p.shape, before)).clone()
            piece.as_strided(p.shape, layout_of(p.shape, p.stride())).copy_(whole)
        return averages

    used: torch.futures.Future[torch.Tensor]
    used = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    return map_future(future, lay_out, used)


def _indices(state: HookState, bucket: GradBucket) -> tuple[int, ...]:
    try:
        return tuple(state.index[parameter] for parameter in bucket.parameters())
    except KeyError:
        raise SyncError(
            "a bucket holds a parameter that was frozen or replaced before hipress was attached; "
            "do that before DistributedDataParallel is made, or freeze after hipress.attach"
        ) from None


def _refuse_moved(engine: Engine, bucket: GradBucket, indices: Sequence[int]) -> None:
    """Raise SyncError for a `.grad` that was given other memory. DDP takes it for the bucket's
    memory and would average the bucket's old contents: the last step's gradient, alike on all
    ranks."""
    memory = bucket.buffer().untyped_storage().data_ptr()
    for index, parameter in zip(indices, bucket.parameters(), strict=True):
        gradient = parameter.grad
        if gradient is not None and gradient.untyped_storage().data_ptr() != memory:
            raise SyncError(
                f"rank {engine.global_rank}: the gradient of {engine.params[index].name!r} lies in "
                "other memory than DDP's bucket, as after `p.grad.data = ...` or "
                "`p.grad.set_(...)`. With gradient_as_bucket_view=True DDP then averages an old "
                "gradient: write in place (`p.grad.mul_(mask)`), or leave gradient_as_bucket_view "
                "out"
            )


PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp = "python_reducer" hands gradients to hooks one by one '
    "and ignores what they return, so ranks would drift apart without an error. Set it to True "
    "(the default) before the model is wrapped."
)


# DDP accepts only a real function with this parameter; fail here rather than there.
assert "bucket" in inspect.signature(gradient_hook).parameters
