"""The parameters of a model, as described to the planner and the state."""

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
from hipress.model.param_kinds import is_kind, kinds_of
from hipress.model.shards import local, refuse_older

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
    strides: tuple[int, ...] = ()  # () if contiguous
    device: torch.device = CPU
    others: tuple[str, ...] = ()  # further names of a tied parameter
    kinds: frozenset[str] = frozenset()  # of hipress.model.param_kinds.KINDS

    def matches(self, pattern: str) -> bool:
        """True if an fnmatch pattern matches one of the parameter's names; a pattern with a space
        matches name and shape, one of hipress.model.param_kinds.KINDS the kind. Brackets, as in
        names of nn.ParameterList and ModuleDict, may stand for themselves."""
        if is_kind(pattern):
            return pattern in self.kinds
        shape = f" {_shape(self.shape)}" if " " in pattern else ""
        names = [f"{name}{shape}" for name in (self.name, *self.others)]
        patterns = pattern, pattern.replace("[", "[[]")
        return any(fnmatchcase(name, each) for name in names for each in patterns)

    @property
    def layout(self) -> tuple[int, ...]:
        """Strides of the gradient in a bucket: the parameter's own if these leave no gaps."""
        return layout_of(self.shape, self.strides)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense gradient."""
        return self.numel * self.dtype.itemsize

    @property
    def reals(self) -> int:
        """Real numbers in a bucket, which holds complex ones as pairs."""
        return self.numel * (2 if self.dtype.is_complex else 1)

    @property
    def compressible(self) -> bool:
        """True for a dense parameter of a type that float32 represents exactly."""
        return not self.sparse and self.dtype in COMPRESSIBLE

    @property
    def named_shape(self) -> str:
        """Name and shape, such as `head.weight 1000x512`."""
        return f"{self.name} {_shape(self.shape)}"

    def __str__(self) -> str:
        strides = f" strides {self.strides}" if self.strides else ""
        return f"{self.named_shape} {_type(self.dtype)}{strides}"


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that DDP synchronizes, in the model's order, without repetitions.

    For a DDP module those that it was made with, whatever was frozen or freed since.
    """
    if isinstance(module, DistributedDataParallel):
        return _parameters_of_ddp(module)
    # DDP ignores parameters by these names; those of the outermost module begin with a dot.
    ignored = compat.names_ignored_by_ddp(module)
    names: dict[nn.Parameter, str] = {}
    for place, part in module.named_modules():
        for last, parameter in part.named_parameters(recurse=False):
            name = f"{place}.{last}"
            if parameter.requires_grad and name not in ignored:
                names.setdefault(parameter, name.removeprefix("."))
    return [(name, parameter) for parameter, name in names.items()]


def describe(module: nn.Module) -> tuple[Param, ...]:
    """The parameters that DDP synchronizes, of a model or DDP module.

    Raises ConfigError for a model that cannot be synchronized.
    """
    refuse_older(module)
    named = trainable(module)
    pairs = [(name, local(parameter)) for name, parameter in named]
    _refuse(pairs)
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    _refuse_nested(module, {parameter for _, parameter in named})
    sparse, names, kinds = _sparse_names(inner), _all_names(inner), kinds_of(inner)
    return tuple(
        Param(
            name, index, p.numel(), tuple(p.shape), p.dtype, name in sparse, _strides(p), p.device,
            tuple(other for other in names[named[index][1]] if other != name),
            frozenset(kinds.get(named[index][1], ())),
        )
        for index, (name, p) in enumerate(pairs)
    )  # fmt: skip


def describe_gradients(module: nn.Module) -> tuple[Param, ...]:
    """The same as `describe` for a plain model, but with the types of the gradients."""
    parameters = [parameter for _, parameter in trainable(module)]
    pairs = zip(describe(module), parameters, strict=True)
    return tuple(replace(param, dtype=compat.gradient_type(p)) for param, p in pairs)


def _all_names(model: nn.Module) -> Mapping[torch.Tensor, list[str]]:
    """All names of each parameter; tied ones have several."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def layout_of(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...]:
    """These strides if they leave no gaps, else those of a contiguous tensor."""
    contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    pairs = sorted((s, n) for s, n in zip(strides, shape, strict=False) if n > 1)
    dense = all(s == prod(n for _, n in pairs[:i]) for i, (s, _) in enumerate(pairs))
    return strides if strides and dense else contiguous


def laid_out(params: Sequence[Param], strides: Iterable[tuple[int, ...]]) -> tuple[Param, ...]:
    """The same parameters with their present strides."""
    pairs = zip(params, strides, strict=True)
    return tuple(p if _lies(p, each) else replace(p, strides=each) for p, each in pairs)


def _lies(param: Param, strides: tuple[int, ...]) -> bool:
    """True if these strides give elements the same order as the parameter's own."""
    orders = zip(param.layout, layout_of(param.shape, strides), param.shape, strict=True)
    return all(one == other for one, other, count in orders if count > 1)


def frozen_tensors(model: nn.Module) -> list[str]:
    """Names, shapes and types of frozen parameters and buffers. DDP broadcasts them when it is
    made, and aborts ranks that differ in a shape."""
    ignored = compat.names_ignored_by_ddp(model)
    return [
        f"{name} {_shape(tensor.shape)} {_type(tensor.dtype)}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not tensor.requires_grad and name not in ignored and not is_lazy(tensor)
    ]


def refuse_broadcast(model: nn.Module, types: Container[torch.dtype] | None = None) -> None:
    """Raise ConfigError for a parameter or buffer that cannot be broadcast to the other ranks.

    types: types that can be sent; None: all.
    """
    ignored = compat.names_ignored_by_ddp(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in ignored or is_lazy(tensor):
            continue
        if tensor.layout != torch.strided:
            why = f"is {_type(tensor.layout)}, not dense"
        elif not writable(tensor):
            why = "is expanded: several of its elements share memory"
        elif types is not None and tensor.dtype not in types:
            why = f"is {_type(tensor.dtype)}, which DDP cannot send (it can send int32 and int64)"
        else:
            continue
        raise ConfigError(
            f"{name!r} {why}, so it cannot be broadcast from the first rank. Make it dense, of "
            "memory of its own (`.contiguous()`) and of a type that can be sent, or keep it out of "
            "the model's parameters and buffers"
        )


def writable(tensor: torch.Tensor) -> bool:
    """True if each element of a dense tensor has memory of its own: false for an expanded one."""
    pairs = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0  # largest offset along smaller strides
    for stride, count in pairs:
        if stride <= reach:
            return False
        reach += stride * (count - 1)
    return True


def as_module(model: object) -> nn.Module:
    """`model` without torch.compile's wrapper; ConfigError for an object that is no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, got {model!r}")
    return compat.uncompiled(model)


def as_ddp(model: nn.Module) -> DistributedDataParallel:
    """`model` as a DDP module, without torch.compile's wrapper; else ConfigError."""
    inner = compat.uncompiled(model)
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigError(
            f"expected a DistributedDataParallel module, got {type(inner).__name__}; "
            "hipress.wrap(model) makes one"
        )
    return inner


def _parameters_of_ddp(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """The parameters in the buckets of a DDP module."""
    if _sparse_names(ddp.module):  # torch makes no zeros of these
        return trainable(ddp.module)
    in_buckets = compat.parameters_in_buckets(ddp)
    return [pair for pair in ddp.module.named_parameters() if pair[1] in in_buckets]


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
    """Raise ConfigError for a part of a synchronized module; see _refuse_nested."""
    for place, part in (named for whole in wrapped for named in whole.module.named_modules()):
        if part is model and place:
            raise ConfigError(
                f"the model is {place!r} of a module that hipress is attached to, which averages "
                f"its {trainable(part)[0][0]!r} already; hipress.detach that module first"
            )


def refuse_shared(model: nn.Module, synchronized: Iterable[nn.Module]) -> None:
    """Raise ConfigError if the model shares a parameter with one of these modules."""
    mine = {parameter: name for name, parameter in trainable(model)}
    for other in synchronized:
        for _, parameter in trainable(other):
            if parameter in mine:
                raise ConfigError(
                    f"hipress synchronizes {mine[parameter]!r} of the model already: first call "
                    "hipress.detach with the module or Gossip that it is attached to"
                )


def _refuse_nested(model: nn.Module, synchronized: Container[nn.Parameter]) -> None:
    """Raise ConfigError for a DDP module inside the model: with two reducers for one parameter,
    plain DDP lets ranks drift apart without an error, or the first backward pass fails. Frozen and
    ignored parameters do no harm."""
    for place, part in model.named_modules():
        if isinstance(part, DistributedDataParallel) and part is not model:
            both = [name for name, parameter in trainable(part) if parameter in synchronized]
            if both:
                raise ConfigError(
                    f"{place!r} in the {type(model).__name__} is a DistributedDataParallel itself, "
                    f"which averages its {both[0]!r} already; put its .module there"
                )


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Strides as DDP compares them between ranks, hanging if they differ; () if contiguous."""
    return () if parameter.is_contiguous() else parameter.stride()


def _sparse_names(module: nn.Module) -> set[str]:
    return {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }
