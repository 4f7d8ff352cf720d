"""Steps of a module without DDP: gradients go to the engine, averages back into `.grad`.

[Note: awaited] From its backward pass to the end of the step a gradient's memory is the engine's,
or its values have been copied. A change then would be lost, or hold for some elements. autograd
counts writes, but not those through `.data`, `.detach()` and `.numpy()`. So `.grad` is an Awaited
then, with which nothing can be done: every use raises an error at its line. It takes 5 µs for a
gradient. Memory known by another name (a flat buffer of all gradients) can still be written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from casync.transports.distributed import break_group, transport_error
from hipress import compat
from hipress.engine.engine import Engine
from hipress.engine.order import Bucket, BucketOrder, buckets
from hipress.errors import SyncError
from hipress.model.params import Param, writable
from hipress.model.shards import as_gradient, is_sharded, local, place_gradient
from hipress.ranks.groups import start_all_reduce_max

__all__ = ["Awaited", "change_error", "hide"]

_ADVICE = (
    "between its backward pass and sync.step(), when it may be on its way already. Clip, unscale, "
    "read and zero gradients after sync.step(), and take no steps of an optimizer in hooks: "
    "optimizer= takes them as averages arrive. To change what is averaged, run all backward passes "
    "within `with sync.no_sync():`, or register hooks of parameters before the Synchronizer is made"
)


class Awaited(torch.Tensor):
    """A gradient that nothing may use."""

    owner: tuple[int, str]  # number of this rank, name of the parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise SyncError, whatever the function."""
        rank, name = next(_owners((args, kwargs or {})))
        raise SyncError(f"rank {rank}: the gradient of {name!r} was used {_ADVICE}")

    def __getattr__(self, name: str) -> Any:
        """Raise SyncError for members of other kinds of gradients, such as a DTensor's."""
        rank, parameter = vars(self)["owner"]
        raise SyncError(f"rank {rank}: the gradient of {parameter!r} was used {_ADVICE}")


def hide(parameter: torch.Tensor, gradient: torch.Tensor, owner: tuple[int, str]) -> None:
    """Let no one use a parameter's gradient. owner: see Awaited."""
    if is_sharded(gradient):  # only the shape counts
        one = torch.empty((), dtype=gradient.dtype, device=gradient.device)
        gradient = one.expand(gradient.shape)
    awaited = torch.Tensor._make_subclass(Awaited, gradient)
    awaited.owner = owner
    parameter.grad = awaited


def change_error(rank: int, name: str) -> SyncError:
    """The error for a gradient of this parameter that was written to or replaced."""
    return SyncError(f"rank {rank}: the gradient of {name!r} was changed {_ADVICE}")


def _owners(arguments: Any) -> Iterator[tuple[int, str]]:
    """Owners of the awaited gradients in arguments."""
    if isinstance(arguments, Awaited):
        yield vars(arguments)["owner"]
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from _owners(each)
    elif isinstance(arguments, dict):
        yield from _owners(list(arguments.values()))


@dataclass(frozen=True)
class _Sent:
    """A bucket that is being averaged."""

    bucket: Bucket
    gradients: Sequence[torch.Tensor]
    flat: torch.Tensor  # averaged in place by the engine
    future: Future[torch.Tensor]


class Steps:
    """Sends gradients as they are ready and, at the end of a step, the rest. See [Note: one order]
    in order.py and [Note: awaited]. Refers to parameters, never to the module."""

    def __init__(
        self,
        engine: Engine,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        arrived: Callable[[Collection[torch.Tensor]], None] | None,
    ) -> None:
        """group: for this object alone, since ranks use it at different moments. arrived: called
        with parameters whose `.grad` is now the average."""
        self._engine, self.parameters, self._arrived = engine, parameters, arrived
        self._where = f"rank {engine.global_rank}"  # for errors
        self._group: dist.ProcessGroup | None = group  # None after a failure
        self._bucket_order: BucketOrder | None = None  # None before the end of the first step
        # ready gradients, hidden, in order, with their `_mark`
        self._ready: dict[int, tuple[torch.Tensor | None, tuple[object, ...]]] = {}
        self._sent: list[_Sent] = []
        self._unused: frozenset[int] = frozenset()  # used by no rank in this step
        self._paused = False
        # see `_first_average`; None after a backward pass
        self._last: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose backward passes send nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def ready(self, index: int) -> None:
        """Take a ready gradient; called by autograd."""
        self._last = None
        if self._paused or self._engine.broken:  # `finish` raises the failure
            return
        with self.failing("a backward pass"):
            if index in self._ready:
                raise SyncError(
                    f"{self._where}: a second gradient of {self._name(index)!r} before "
                    "sync.step(): it may be on its way already. Run all backward passes of a step "
                    "but the last within `with sync.no_sync():`. Where one pass computes it in "
                    "parts, as torch.utils.checkpoint does with a layer that is used again, pass "
                    "use_reentrant=False to checkpoint, or run that pass within no_sync, too"
                )
            gradient = self._place(index)
            self._ready[index] = gradient, self._mark(gradient)
            if gradient is not None:
                hide(
                    self.parameters[index], gradient, (self._engine.global_rank, self._name(index))
                )
            for bucket in self._bucket_order.ready(index) if self._bucket_order is not None else ():
                self._send(bucket)

    def finish(self) -> None:
        """Send all that has not gone, and wait until every `.grad` is the average."""
        self._engine.refuse_broken()
        with self.failing("sync.step()"):
            self._refuse_again()
            self._refuse_changed()
            for index in range(len(self.parameters)):  # gradients of backward passes within no_sync
                self._place(index)
            used, reduction = self._reduce_used()
            if self._bucket_order is None:
                self._bucket_order = self._agree_on_order()
            if self._bucket_order.incomplete:
                self._wait(reduction)
                self._send_rest(self._bucket_order, used.tolist())
            step = self._engine.reduction  # None if no rank has a gradient
            if step is not None:
                step.finish(self._place_averages)
            self._wait(reduction)
        if step is not None:
            step.undo(self._unused)  # their averages are dropped
        self._bucket_order.reset()
        self._ready.clear()
        self._sent.clear()
        self._unused = frozenset()
        self._last = self._first_average()

    def _first_average(self) -> tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None:
        """The first average in a `.grad`, its writes and its sum, which stay as they are until
        somebody changes it."""
        gradient = next((p.grad for p in self.parameters if p.grad is not None), None)
        if gradient is None or gradient.is_sparse or gradient.is_inference():
            return None
        return weakref.ref(gradient), compat.writes(gradient), local(gradient).sum()

    def _refuse_again(self) -> None:
        """Raise SyncError if there is no gradient since the last step but its own averages."""
        before, now = self._last, self._first_average() if self._last is not None else None
        if before is None or now is None or before[0]() is not now[0]():
            return
        if before[1] == now[1] and torch.equal(before[2], now[2]):
            raise SyncError(
                f"{self._where}: sync.step() a second time, and no gradient since: the "
                "averages would be averaged again, with what compressors left out. Call it once "
                "for each optimizer.step(), and zero gradients in between"
            )

    def _place(self, index: int) -> torch.Tensor | None:
        """A gradient distributed like its parameter, with memory of its own for each element."""
        parameter = self.parameters[index]
        place_gradient(parameter)
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or is_sharded(gradient):
            return parameter.grad
        if gradient.is_inference() or not writable(gradient):
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        return parameter.grad

    def _refuse_changed(self) -> None:
        """Show the gradients again; raise SyncError for one that was changed after it was ready."""
        hidden = {index: self.parameters[index].grad for index in self._ready}
        self.show()
        for index, (gradient, mark) in self._ready.items():
            if not isinstance(hidden[index], Awaited) or self._mark(gradient) != mark:
                raise change_error(self._engine.global_rank, self._name(index))

    def show(self) -> None:
        """Make hidden gradients those of their parameters again."""
        for index, (gradient, _) in self._ready.items():
            if isinstance(self.parameters[index].grad, Awaited):
                self.parameters[index].grad = gradient

    def _mark(self, gradient: torch.Tensor | None) -> tuple[object, ...]:
        """A value that changes when a gradient is written to, or moved to other memory: autograd's
        count of writes, which the engine's own writes do not change. Gradients in one memory (a
        flat buffer, shards of FSDP2) share a count; in the first step their sum is used instead."""
        if gradient is None:
            return ()
        whole = local(gradient)
        if whole.is_sparse:
            return (compat.writes(gradient),)
        if whole.untyped_storage().nbytes() == whole.nbytes and not is_sharded(gradient):
            return compat.writes(gradient), whole.data_ptr()
        if self._bucket_order is not None:
            return (whole.data_ptr(),)
        total: float = whole.abs().sum(dtype=torch.float64).item()
        return whole.data_ptr(), total.hex()

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Make any error inside end the engine on all ranks, which learn it as the group breaks:
        dropping it is not enough, since the error's frames, or a work under way, may keep it."""
        try:
            with self._engine.failing(what):
                yield
        except BaseException:
            group, self._group = self._group, None
            if group is not None:
                break_group(group)
            self.show()
            raise

    def _reduce_used(self) -> tuple[torch.Tensor, Future[torch.Tensor]]:
        """Start to combine flags over the ranks: of parameters with a gradient on any rank, once
        the future is done."""
        flags = [parameter.grad is not None for parameter in self.parameters]
        used = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        return used, start_all_reduce_max(used, self._open_group())

    def _wait(self, reduction: Future[torch.Tensor]) -> None:
        try:
            self._engine.channels.failures.wait(reduction, self._engine.options.timeout)
        except Exception as error:
            self._engine.finish()  # the error of a failed bucket says more
            what = f"{self._where}: comparing which parameters ranks used, at the end of a step,"
            raise transport_error(error, what, self._engine.options.timeout) from error

    def _agree_on_order(self) -> BucketOrder:
        """Order by rank 0's gradients; other parameters follow, the last one first."""
        engine = self._engine
        backwards = reversed(range(len(self.parameters)))
        order = torch.tensor(list(dict.fromkeys([*self._ready, *backwards])), device="cpu")
        group = self._open_group()
        if group.rank() > 0:
            order.fill_(-1)
        self._wait(start_all_reduce_max(order, group))
        params = [engine.params[i] for i in order.tolist()]
        return BucketOrder(buckets(params, engine.plan, engine.options))

    def _send_rest(self, order: BucketOrder, used: Sequence[int]) -> None:
        self._unused = frozenset(i for i, flag in enumerate(used) if not flag)
        for bucket in order.rest(self._unused):
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        gradients = [self._gradient(index) for index in bucket.indices]
        unused = self._unused.intersection(bucket.indices)
        step = self._engine.reduction if self._sent else self._engine.begin(self.parameters)
        assert step is not None  # it is under way as long as something is sent
        step.keep(unused)
        # not detach, with which the engine's writes would count as the user's: see _mark
        flat = bucket.gather([gradient.data for gradient in gradients])
        future = step.reduce(bucket.indices, flat)
        self._sent.append(_Sent(bucket, gradients, flat, future))

    def _place_averages(self, number: int) -> None:
        """Take the averages of a complete bucket."""
        sent = self._sent[number]
        sent.bucket.scatter(sent.flat, sent.gradients)
        gradients = [sent.future.value()] if sent.flat.is_sparse else sent.gradients
        parameters = []
        for index, gradient in zip(sent.bucket.indices, gradients, strict=True):
            parameter = self.parameters[index]
            if index not in self._unused:
                if parameter.grad is None or gradient.is_sparse:  # otherwise averaged in place
                    parameter.grad = as_gradient(gradient, parameter)
                parameters.append(parameter)
        if self._arrived is not None:
            self._arrived(parameters)

    def _gradient(self, index: int) -> torch.Tensor:
        """A parameter's gradient; zeros if this rank has none."""
        param, (own, _) = self._engine.params[index], self._ready.get(index, (None, ()))
        own = self.parameters[index].grad if own is None else own
        if own is not None:
            gradient = local(own)
            self._check(gradient, param)
            return gradient
        if param.sparse:
            rows = torch.empty((1, 0), dtype=torch.int64, device=param.device)
            values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
            return torch.sparse_coo_tensor(rows, values, param.shape)
        zeros = torch.empty_strided(
            param.shape, param.layout, dtype=param.dtype, device=param.device
        )
        return zeros.zero_()

    def _check(self, gradient: torch.Tensor, param: Param) -> None:
        if gradient.is_sparse != param.sparse:
            kinds = ("dense", "sparse") if param.sparse else ("sparse", "dense")
            raise SyncError(
                f"{self._where}: the gradient of {param.name!r} is {kinds[0]}, expected "
                f"was a {kinds[1]} one: only those of nn.Embedding(sparse=True) and "
                "nn.EmbeddingBag(sparse=True) are sparse"
            )
        if gradient.dtype != param.dtype:
            raise SyncError(
                f"{self._where}: the gradient of {param.name!r} is {gradient.dtype}, "
                f"expected was {param.dtype}: set the parameter's grad_dtype before the "
                "Synchronizer is made"
            )

    def _name(self, index: int) -> str:
        return self._engine.params[index].name

    def _open_group(self) -> dist.ProcessGroup:
        assert self._group is not None  # no step begins after a failure
        return self._group
