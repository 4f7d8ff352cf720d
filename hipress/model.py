"""The parameters of a model as the planner and the state see them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hipress import compat
from hipress.errors import ConfigError
from hipress.shards import local, refuse_older

CPU = torch.device("cpu")
COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Param:
    """A trainable parameter. `index` counts the trainable ones in the model's order."""

    name: str
    index: int
    numel: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool  # its gradient is a sparse tensor (nn.Embedding(sparse=True))
    strides: tuple[int, ...] = ()  # where they are not those of a contiguous tensor
    device: torch.device = CPU
    others: tuple[str, ...] = ()  # names of the same parameter in other modules: it is tied

    def matches(self, pattern: str) -> bool:
        """Whether an fnmatch pattern is of one of its names; with a space in it, of a name and the
        shape. Brackets, which are in names of nn.ParameterList and ModuleDict, may stand for
        themselves."""
        shape = f" {_shape(self.shape)}" if " " in pattern else ""
        names = [f"{name}{shape}" for name in (self.name, *self.others)]
        patterns = pattern, pattern.replace("[", "[[]")
        return any(fnmatchcase(name, each) for name in names for each in patterns)

    @property
    def layout(self) -> tuple[int, ...]:
        """Strides of its gradient in a bucket: the parameter's own where these leave no gaps."""
        return layout_of(self.shape, self.strides)

    @property
    def reals(self) -> int:
        """Numbers in a bucket, which holds complex ones as pairs."""
        return self.numel * (2 if self.dtype.is_complex else 1)

    @property
    def compressible(self) -> bool:
        """Dense and of a type that float32 represents exactly."""
        return not self.sparse and self.dtype in COMPRESSIBLE

    @property
    def named_shape(self) -> str:
        """Such as `head.weight 1000x512`."""
        return f"{self.name} {_shape(self.shape)}"

    def __str__(self) -> str:
        strides = f" strides {self.strides}" if self.strides else ""
        return f"{self.named_shape} {_type(self.dtype)}{strides}"


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that DDP synchronizes, in the model's order, each once.

    Of a DDP module those that it was made with, whatever was frozen or freed since.
    """
    if isinstance(module, DistributedDataParallel):
        return _held(module)
    # DDP looks them up by these names: with a dot before those of the outermost module.
    ignored = compat.names_ignored_by_ddp(module)
    found: dict[nn.Parameter, str] = {}
    for place, part in module.named_modules():
        for last, parameter in part.named_parameters(recurse=False):
            name = f"{place}.{last}"
            if parameter.requires_grad and name not in ignored:
                found.setdefault(parameter, name.removeprefix("."))
    return [(name, parameter) for parameter, name in found.items()]


def describe(module: nn.Module) -> tuple[Param, ...]:
    """The parameters that DDP synchronizes, of a model or DDP module.

    Raises ConfigError for what cannot be synchronized.
    """
    refuse_older(module)
    named = trainable(module)
    pairs = [(name, local(parameter)) for name, parameter in named]
    _refuse(pairs)
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    _refuse_nested(module, {parameter for _, parameter in named})
    sparse, names = _sparse_names(inner), _all_names(inner)
    return tuple(
        Param(
            name, index, p.numel(), tuple(p.shape), p.dtype, name in sparse, _strides(p), p.device,
            tuple(other for other in names[named[index][1]] if other != name),
        )
        for index, (name, p) in enumerate(pairs)
    )  # fmt: skip


def _all_names(model: nn.Module) -> Mapping[torch.Tensor, list[str]]:
    """By parameter, all its names: several of a tied one."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def layout_of(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...]:
    """These strides where they leave no gaps, else those of a contiguous tensor."""
    contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    pairs = sorted((s, n) for s, n in zip(strides, shape, strict=False) if n > 1)
    dense = all(s == prod(n for _, n in pairs[:i]) for i, (s, _) in enumerate(pairs))
    return strides if strides and dense else contiguous


def laid_out(params: Sequence[Param], strides: Iterable[tuple[int, ...]]) -> tuple[Param, ...]:
    """The same parameters, with strides that they were given since."""
    pairs = zip(params, strides, strict=True)
    return tuple(p if _lies(p, each) else replace(p, strides=each) for p, each in pairs)


def _lies(param: Param, strides: tuple[int, ...]) -> bool:
    """Whether elements lie by these strides as by the parameter's own."""
    orders = zip(param.layout, layout_of(param.shape, strides), param.shape, strict=True)
    return all(one == other for one, other, count in orders if count > 1)


def frozen_tensors(model: nn.Module) -> list[str]:
    """Frozen parameters and buffers, which DDP broadcasts as it is made: ranks where they differ
    in shape end by an abort."""
    ignored = compat.names_ignored_by_ddp(model)
    return [
        f"{name} {_shape(tensor.shape)} {_type(tensor.dtype)}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not tensor.requires_grad and name not in ignored and not is_lazy(tensor)
    ]


def refuse_broadcast(model: nn.Module, types: Container[torch.dtype] | None = None) -> None:
    """Raise ConfigError for a parameter or buffer that cannot be given to the other ranks.
    types: those that can be sent; None: all."""
    ignored = compat.names_ignored_by_ddp(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in ignored or is_lazy(tensor):
            continue
        if tensor.layout != torch.strided:
            why = f"is {_type(tensor.layout)}, not dense"
        elif not writable(tensor):
            why = "is expanded: several of its elements share memory"
        elif types is not None and tensor.dtype not in types:
            why = f"is of {_type(tensor.dtype)}, which DDP cannot send (int32 and int64 it can)"
        else:
            continue
        raise ConfigError(
            f"{name!r} {why}, so it cannot be broadcast from the first rank. Make it dense, of "
            "memory of its own (`.contiguous()`) and of a type that can be sent, or keep it out of "
            "the model's parameters and buffers"
        )


def writable(tensor: torch.Tensor) -> bool:
    """Whether each element of a dense tensor has memory of its own: not of an expanded one."""
    pairs = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0  # of the elements along smaller strides
    for stride, count in pairs:
        if stride <= reach:
            return False
        reach += stride * (count - 1)
    return True


def as_ddp(model: nn.Module) -> DistributedDataParallel:
    """The DDP module that `model` is, or that torch.compile made it from."""
    inner = compat.uncompiled(model)
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigError(
            f"expected a DistributedDataParallel module, got {type(inner).__name__}; "
            "hipress.wrap(model) makes one"
        )
    return inner


def _held(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """The parameters in the buckets of a DDP module."""
    if _sparse_names(ddp.module):  # of which torch makes no zeros
        return trainable(ddp.module)
    held = compat.parameters_in_buckets(ddp)
    return [pair for pair in ddp.module.named_parameters() if pair[1] in held]


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _type(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def _refuse(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    pairs = list(pairs)
    if not pairs:
        raise ConfigError("the model has no parameter that requires a gradient")
    for name, parameter in pairs:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"parameter {name!r} has no shape yet; run one forward pass first")


def refuse_part(model: nn.Module, wrapped: Iterable[DistributedDataParallel]) -> None:
    """Raise ConfigError for a part of what is synchronized already; see _refuse_nested."""
    for place, part in (named for whole in wrapped for named in whole.module.named_modules()):
        if part is model and place:
            raise ConfigError(
                f"the model is {place!r} of a module that hipress is attached to, which averages "
                f"its {trainable(part)[0][0]!r} already; hipress.detach that module first"
            )


def refuse_shared(model: nn.Module, synchronized: Iterable[nn.Module]) -> None:
    """Raise ConfigError for a model of which one of these modules has a parameter."""
    mine = {parameter: name for name, parameter in trainable(model)}
    for other in synchronized:
        for _, parameter in trainable(other):
            if parameter in mine:
                raise ConfigError(
                    f"hipress synchronizes {mine[parameter]!r} of the model already; "
                    "hipress.detach what does first"
                )


def _refuse_nested(model: nn.Module, synchronized: Container[nn.Parameter]) -> None:
    """Two reducers for one parameter: under plain DDP ranks drift apart without an error, or the
    first backward pass fails. Frozen ones, and those that DDP ignores, are in nobody's way."""
    for place, part in model.named_modules():
        if isinstance(part, DistributedDataParallel) and part is not model:
            both = [name for name, parameter in trainable(part) if parameter in synchronized]
            if both:
                raise ConfigError(
                    f"{place!r} in the {type(model).__name__} is a DistributedDataParallel itself, "
                    f"which averages its {both[0]!r} already; put its .module there"
                )


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """As DDP compares them between ranks, and may hang where they differ."""
    return () if parameter.is_contiguous() else parameter.stride()


def _sparse_names(module: nn.Module) -> set[str]:
    return {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }
