"""Uses of private torch APIs; if torch changes, only this file does.

Each function states its use and its fallback for versions of torch that lack it. Public names that
torch keeps in odd places are imported where they are used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "GradBucket",  # public in torch.distributed, but unknown to type checkers, like the stores
    "PrefixStore",
    "Store",
    "another_client",
    "backward_id",
    "call_after_backward",
    "comm_hooks",
    "divides_by_active_ranks",
    "end_event_with",
    "gloo_group",
    "gradient_type",
    "group_name",
    "group_timeout",
    "has_requests_of_several_keys",
    "has_unscaled",
    "is_collective",
    "job_store",
    "names_ignored_by_ddp",
    "parameters_in_buckets",
    "parameters_of",
    "profiled",
    "skips_unused_buckets",
    "sparse_bytes",
    "store_address",
    "store_host",
    "uncompiled",
    "unhooked_step",
    "untraced",
    "uses_python_reducer",
    "writes",
]


P = ParamSpec("P")
T = TypeVar("T")
_NO_EVENT = nullcontext()


def job_store() -> Store:
    """The key-value store of `init_process_group`."""
    return distributed_c10d._get_default_store()


def store_host(store: Store) -> str | None:
    """Host of a TCP store, below any prefix; None for stores that have none."""
    host: str | None = getattr(_below_prefixes(store), "host", None)
    return host


def store_address(store: Store) -> str | None:
    """`host:port` of a TCP store, below any prefix; None for stores that have none."""
    host = store_host(store)
    return None if host is None else f"{host}:{getattr(_below_prefixes(store), 'port', None)}"


def another_client(store: Store) -> Store:
    """The same store on a connection of its own, which waiting calls of the other do not block."""
    again: Store = store.clone()  # type: ignore[attr-defined] # not in torch's annotations
    return again


def _below_prefixes(store: Store) -> Store:
    below: Store = getattr(store, "_underlying_non_prefix_store", store)
    return below


def has_requests_of_several_keys(store: object) -> bool:
    """True for a store with `multi_get`; those that are written in Python have none."""
    extended = getattr(store, "has_extended_api", None)  # not in torch's annotations
    return extended is not None and bool(extended())


def group_name(group: dist.ProcessGroup) -> str:
    """Name of a group, the same on all its ranks, since the keys by which they connect have it;
    "None" for a group that torch.distributed does not know."""
    return distributed_c10d._get_process_group_name(group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Time-out of a group's operations on the CPU; torch's default if the backend has none."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):  # a backend without such options, or none for the CPU
        return default_pg_timeout
    return timeout


def has_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """True if the scaler has unscaled the optimizer's present gradients, before its step."""
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return state.get("stage") is OptState.UNSCALED


def is_collective(error: BaseException) -> bool:
    """True for an error of torch's communication; gloo's are recognized by their text only."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo backend outside of all groups that torch.distributed knows.

    It is a backend, not a group, but has all operations of a group that hipress uses.
    """
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, timeout))


def empty_pinned_cache() -> None:
    """Give pinned memory that torch keeps for later back to the system, where torch can."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None and torch.cuda.is_available():
        empty()


def finished_work(tensors: list[torch.Tensor]) -> dist.Work:
    """Work of torch.distributed that is over, on a GPU once the current stream gets here: another
    stream that waits for it comes after that."""
    devices: list[int | str | torch.device]
    devices = list({each.device for each in tensors if each.is_cuda})
    future: torch.futures.Future[list[torch.Tensor]]
    future = torch.futures.Future(devices=devices or None)
    future.set_result(tensors)
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


def gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """Type of a parameter's gradient: its own, unless `grad_dtype` of torch 2.10 names another."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def names_ignored_by_ddp(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that DDP ignores at the module's request."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def parameters_in_buckets(ddp: DistributedDataParallel) -> set[torch.Tensor]:
    """The parameters in the buckets of a DDP module without sparse gradients."""
    # torch tells them only with zeros in the size of all gradients
    with _Unfilled():  # type: ignore[no-untyped-call]
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return {parameter for bucket in buckets for parameter in bucket.parameters()}


class _Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors in the form of another have no memory: they are on the device "meta"."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **{**(kwargs or {}), "device": "meta"})


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters of a model, tied ones repeated; 3 times as fast as `model.parameters()`."""
    for part in model.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                yield parameter


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Registered communication hooks, with their states."""
    return list(ddp._comm_hooks)


def profiled(name: str) -> AbstractContextManager[object]:
    """An event `hipress:NAME` in the trace of a torch.profiler.

    Without a profiler, or in a torch without the flag, this takes 1 µs; record_function alone would
    take 25.
    """
    running = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return record_function(f"hipress:{name}") if running else _NO_EVENT


def end_event_with(event: object, future: torch.futures.Future[torch.Tensor]) -> None:
    """Let an event of `profiled` last until this future is done, in any thread, like those of DDP's
    all-reduces."""
    if isinstance(event, record_function):
        event._call_end_callbacks_on_future(future)


def skips_unused_buckets(ddp: DistributedDataParallel) -> bool:
    """True if DDP leaves out buckets of unused parameters (not in every torch)."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))


def divides_by_active_ranks(ddp: DistributedDataParallel) -> bool:
    """True if DDP is in a `join` with divide_by_initial_world_size=False."""
    return ddp._join_config.enable and not ddp._divide_by_initial_world_size


def sparse_bytes(gradient: torch.Tensor) -> int:
    """Bytes of indices and values of a sparse tensor, duplicates included."""
    return gradient._indices().nbytes + gradient._values().nbytes


def writes(tensor: torch.Tensor) -> int:
    """Number of in-place writes to a tensor, as counted by autograd."""
    return tensor._version


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, or the model itself."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model


def unhooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method `step` of an optimizer, without the hooks that torch puts around the step of
    an instance's class; torch calls them around a subclass's step anyway."""
    function: Any = getattr(step, "__func__", step)
    if not getattr(function, "hooked", False):
        return step
    return partial(function.__wrapped__, getattr(step, "__self__", None))


def uses_python_reducer() -> bool:
    """True if dynamo hands gradients to hooks one by one and ignores the hooks' results."""
    # Imported by torch.nn.parallel anyway, so this costs nothing.
    from torch._dynamo.utils import get_optimize_ddp_mode

    return bool(get_optimize_ddp_mode() == "python_reducer")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which runs as it is where torch.compile has compiled its caller."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # its import takes as long as torch's
            return function(*args, **options)
        disabled: Callable[P, T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **options)

    return call


def backward_id() -> int | None:
    """Number of the backward pass that runs in this thread, if one does."""
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have autograd call `callback` after the running backward pass has run all nodes."""
    Variable._execution_engine.queue_callback(callback)
