"""Application of a method to a model, and a count of the payload bytes that it sends."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from hipress.tools.run import fsdp2
from hipress.tools.run.jobs import PHASES
from hipress.tools.run.lstm import Training
from hipress.tools.run.methods import (
    FREEZE,
    HSDP,
    MOMENTUM,
    OUTER,
    SHARD,
    Method,
    outer_options,
    wrapped,
)

ONE_BUCKET = 4096  # MB: with several buckets PowerSGD's two all-reduces would mix on gloo


@dataclass(frozen=True)
class Synchronized:
    """A model whose gradients are synchronized after its backward pass and `step`."""

    module: nn.Module
    #: steps taken so far -> payload bytes that this rank has sent so far
    sent: Callable[[int], int] = lambda steps: 0
    step: Callable[[], None] = lambda: None
    tried: Callable[[], list[dict[str, Any]]] = list  # plans of "auto", as predicted and measured
    phases: Callable[[], dict[str, float] | None] = lambda: None  # seconds so far, by job.PHASES
    optimizer: torch.optim.Optimizer | None = None  # steps in place of the task's
    clips: bool = True  # for itself, if there is one
    stepped: Callable[[], None] = lambda: None  # after its step


def synchronize(
    model: nn.Module, method: Method, training: Training, per_host: int = 1
) -> Synchronized:
    """Wrap or shard the model for training. per_host: ranks of a host. Raises errors of torch and
    of hipress."""
    if method.way in (SHARD, HSDP) or method.text in fsdp2.PLAIN:
        return Synchronized(*fsdp2.shard(model, method, per_host))
    if method.codec is not None:
        return _hipress(model, method, training)
    return _BASELINES[method.text](model)


def _none(model: nn.Module) -> Synchronized:
    return Synchronized(model)


def _noop(model: nn.Module) -> Synchronized:
    """The floor of every method: DDP's own work, and waiting for the slowest rank."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    counter = _CountedAllReduce()

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not bucket.is_last():
            return debugging_hooks.noop_hook(None, bucket)
        met = dist.all_reduce(torch.zeros(1), async_op=True)
        whole: torch.futures.Future[torch.Tensor] = met.get_future().then(lambda _: bucket.buffer())
        return whole

    ddp.register_comm_hook(None, hook)
    return Synchronized(ddp, lambda steps: counter.sent)


def _fp32(model: nn.Module) -> Synchronized:
    return Synchronized(DistributedDataParallel(model), _native(model))


def _half(model: nn.Module, hook: Callable[..., Any]) -> Synchronized:
    ddp = DistributedDataParallel(model)
    counter = _CountedAllReduce()
    ddp.register_comm_hook(None, hook)
    return Synchronized(ddp, lambda steps: counter.sent)


def _bf16(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook of this name, which refuses CPUs, on any device."""
    halves = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    summed = dist.all_reduce(halves, async_op=True).get_future()
    whole: torch.futures.Future[torch.Tensor] = summed.then(
        lambda done: bucket.buffer().copy_(done.value()[0])
    )
    return whole


def _powersgd(
    model: nn.Module, hook: Callable[..., Any] = powerSGD_hook.powerSGD_hook
) -> Synchronized:
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET)
    counter = _CountedAllReduce()
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, hook)
    return Synchronized(ddp, lambda steps: counter.sent)


def _powersgd_fp16(model: nn.Module) -> Synchronized:
    return _powersgd(model, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))


def _hipress(model: nn.Module, method: Method, training: Training) -> Synchronized:
    import hipress  # not above: a baseline does without
    from hipress.model.devices import by_gloo

    assert method.codec is not None
    assert dist.group.WORLD is not None
    options = wrapped(method)
    if method.way == OUTER:
        return _outer(model, method, training)
    if next(model.parameters()).is_cuda and by_gloo(dist.group.WORLD):  # ranks may share a GPU
        options = {"transport": "staged", **options}
    if method.way == "sync":
        sync = hipress.Synchronizer(model, method.codec, **options)
        return Synchronized(model, _bytes_sent(sync, model), sync.step, _plans(sync), _phases(sync))
    optimizer = None
    if method.way == MOMENTUM:
        optimizer = training.averaged(model.parameters(), method.options.get(FREEZE, "auto"))
        options = {"optimizer": optimizer, **options}
    ddp = hipress.wrap(model, method.codec, **options)
    return Synchronized(
        ddp,
        _bytes_sent(ddp, model),
        tried=_plans(ddp),
        phases=_phases(ddp),
        optimizer=optimizer,
    )


def _outer(model: nn.Module, method: Method, training: Training) -> Synchronized:
    import hipress

    assert method.codec is not None
    optimizer = training.make(model.parameters())
    outer = hipress.Outer(
        model, optimizer, method.codec, **wrapped(method), **outer_options(method)
    )
    return Synchronized(
        model,
        lambda steps: hipress.report(outer).sent_bytes,
        optimizer=optimizer,
        clips=False,
        stepped=outer.step,
    )


def _bytes_sent(synchronized: Any, model: nn.Module) -> Callable[[int], int]:
    """Bytes sent, by the report of a wrapped model or a Synchronizer."""
    import hipress

    def sent(steps: int) -> int:
        measured = hipress.report(synchronized).measured
        if measured is None:  # DDP's own all-reduce is still in place
            return _native(model)(steps)
        size: int = round((measured.wire_bytes + measured.spared_bytes) * measured.steps)
        return size

    return sent


def _plans(synchronized: Any) -> Callable[[], list[dict[str, Any]]]:
    import hipress

    def predicted() -> list[dict[str, Any]]:
        return [
            asdict(each) for each in hipress.report(synchronized).tried if each.predicted_seconds
        ]

    return predicted


def _phases(synchronized: Any) -> Callable[[], dict[str, float] | None]:
    import hipress

    def spent() -> dict[str, float] | None:
        measured = hipress.report(synchronized).measured
        names = (*PHASES, "spared_bytes")
        if measured is None:
            return None
        return {name: getattr(measured, name) * measured.steps for name in names}

    return spent


def _native(model: nn.Module) -> Callable[[int], int]:
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return lambda steps: steps * _ring_bytes(size)


_BASELINES: dict[str, Callable[[nn.Module], Synchronized]] = {
    "none": _none,
    "ddp-noop": _noop,
    "ddp-fp32": _fp32,
    "ddp-fp16": partial(_half, hook=default_hooks.fp16_compress_hook),
    "ddp-bf16": partial(_half, hook=_bf16),
    "powersgd": _powersgd,
    "powersgd-fp16": _powersgd_fp16,
}


class _CountedAllReduce:
    """Counts bytes that PyTorch's hooks pass to `dist.all_reduce`, looked up at each call."""

    def __init__(self) -> None:
        self.sent = 0
        self._original = dist.all_reduce
        dist.all_reduce = self._all_reduce

    def _all_reduce(self, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        self.sent += _ring_bytes(tensor.numel() * tensor.element_size())
        return self._original(tensor, *arguments, **options)


def _ring_bytes(size: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes."""
    world = dist.get_world_size()
    return 2 * (world - 1) * size // world
