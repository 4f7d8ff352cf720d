"""The parts of FSDP2 that hipress uses, private ones included; if torch changes, only this does.

[Note: rows] A reduce-scatter's input has a row for each rank, and a row has that rank's chunk of
each parameter along dimension 0, in FSDP's order, padded with zeros to the length of the first
rank's chunk. Parameters without a gradient in the backward pass are left out, so the length varies.
An all-gather's output has the same rows, of all parameters.

[Note: weights] The forward and the backward pass must compute with the same bits, and FSDP2 gathers
weights for each. So stochastic codecs draw by the number of the weights, which changes as they are
written, whatever passes run in between: micro-batches of a pipeline, a loss in chunks, or nested
passes of a checkpoint. torch counts writes to a tensor, except those of fused optimizers to
DTensors, so steps of optimizers are counted, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hipress import compat
from hipress.errors import ConfigError
from hipress.model.param_kinds import kinds_of
from hipress.model.params import Param
from hipress.model.shards import fsdp_parts, is_sharded, refuse_older, reshard

__all__ = ["Comm", "Group", "count_steps", "divisor_of", "groups_of", "params_of"]

Comm: TypeAlias = Callable[..., dist.Work | None]  # torch's AllGather or ReduceScatter

#: methods of FSDPModule, and the first version of torch that has them
_SINCE = {"set_custom_all_gather": "2.9", "set_custom_reduce_scatter": "2.9"}
_OWN = ("DefaultAllGather", "DefaultReduceScatter")


class Group:
    """The parameters of one call of `fully_shard`, which FSDP2 gathers and reduces together."""

    def __init__(self, name: str, part: Any) -> None:
        """name: of the module. part: the module. Raises ConfigError for a group whose collectives
        cannot be replaced."""
        self.name = name or "the model"
        self._part = part
        self._inner = _only_group(self.name, part)
        self.before = self._inner._all_gather_comm, self._inner._reduce_scatter_comm
        _refuse_comms(self.name, self.before)
        if self.hooked:
            raise ConfigError(
                f"{self.name!r} has an all-reduce hook: hipress.shard would take its place; pass "
                "replicas= instead of calling set_all_reduce_hook"
            )
        #: inputs of reduce-scatters in flight that the user allows
        self._buffers = getattr(self._inner, "reduce_scatter_max_input_buffers", 1)
        self.lengths = tuple(prod(p.padded_sharded_param_size) for p in self._inner.fsdp_params)
        self.starts = tuple(accumulate(self.lengths, initial=0))  # in a row of all parameters
        self.used: tuple[int, ...] = ()  # parameters with a gradient in this backward pass
        #: sums of passes that replicas have not averaged, by parameter
        self.held: dict[int, torch.Tensor] = {}
        self._version = 0  # see version()
        self._counted: int | None = self.writes

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards of this rank."""
        return [each.sharded_param for each in self._inner.fsdp_params]

    @property
    def frozen(self) -> list[bool]:
        """True for each parameter that needs no gradient."""
        return [not each.requires_grad for each in self.parameters]

    @property
    def gathered(self) -> torch.dtype:
        """The type in which FSDP gathers the parameters: uint8 if as bytes, since they have several
        types, or make their own inputs (`fsdp_pre_all_gather`)."""
        locals_ = [each._sharded_local_tensor for each in self._inner.fsdp_params]
        if any(hasattr(each, "fsdp_pre_all_gather") for each in locals_):
            return torch.uint8
        types = {self._computed(each.dtype) for each in locals_}
        return types.pop() if len(types) == 1 else torch.uint8

    @property
    def reduced(self) -> torch.dtype:
        """The type in which FSDP adds up gradients."""
        types = {p.dtype for p in self.parameters if p.requires_grad}
        kind = self._computed(types.pop() if types else torch.float32)
        return self._inner.mp_policy.reduce_dtype or kind

    def _computed(self, kind: torch.dtype) -> torch.dtype:
        """The type in which a parameter is used."""
        return (self._inner.mp_policy.param_dtype or kind) if kind.is_floating_point else kind

    @property
    def writes(self) -> int:
        """Number of writes to the shards so far, as counted by torch: see [Note: weights]."""
        wrapped = [
            *self.parameters,
            *(each._sharded_local_tensor for each in self._inner.fsdp_params),
        ]
        return sum(map(compat.writes, wrapped))

    def version(self) -> int:
        """Number of the present weights: they have another one after each write to them."""
        if (counted := self.writes) != self._counted:
            self._version += self._counted is not None
            self._counted = counted
        return self._version

    def go_on(self, version: int) -> None:
        """Give the weights this number, also if they are written before they are used."""
        self._version, self._counted = version, None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the first rank's shards."""
        return [tuple(each.padded_sharded_param_size) for each in self._inner.fsdp_params]

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The ranks that hold the shards."""
        group: dist.ProcessGroup = self._inner.mesh_info.shard_process_group
        return group

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        device: torch.device = self._inner.device
        return device

    @property
    def replicated(self) -> bool:
        """True if FSDP itself averages replicas of the shards."""
        return hasattr(self._inner.mesh_info, "replicate_process_group")

    @property
    def hooked(self) -> bool:
        """True if FSDP calls a hook with the output of a reduce-scatter."""
        return self._inner._all_reduce_hook is not None

    @property
    def in_backward(self) -> bool:
        """True until FSDP has finished the outermost backward pass that it takes part in."""
        state = self._part._get_fsdp_state()._state_ctx
        return bool(state.post_backward_final_callback_queued)

    @property
    def averages(self) -> bool:
        """False while the user has replicas not averaged (`set_requires_all_reduce`)."""
        return bool(self._inner.all_reduce_grads)

    def install(
        self,
        all_gather: Comm | None,
        reduce_scatter: Comm | None,
        hook: Callable[[torch.Tensor], None] | None,
        began: Callable[[], None],
        ended: Callable[[], None],
        buffers: int,
    ) -> None:
        """Replace FSDP's collectives. began: called before a backward pass sends the gradients of
        this group. ended: called before `reset_iter_state` drops what is under way. buffers: inputs
        of reduce-scatters in flight."""
        if all_gather is not None:
            self._part.set_custom_all_gather(all_gather)
        if reduce_scatter is not None:
            self._part.set_custom_reduce_scatter(reduce_scatter)
            self._allow(buffers)
        if hook is not None:
            self._part.set_all_reduce_hook(hook)
        own = self._inner.post_backward
        self._inner.post_backward = partial(self._post_backward, own, began)
        if hasattr(self._inner, "_reset_iter_state"):  # from torch 2.12 on
            reset = self._inner._reset_iter_state
            self._inner._reset_iter_state = partial(self._reset, reset, ended)

    def restore(self) -> None:
        """Give FSDP its own collectives back."""
        self._inner._all_gather_comm, self._inner._reduce_scatter_comm = self.before
        self._inner._all_reduce_hook = None
        for method in ("post_backward", "_reset_iter_state"):
            self._inner.__dict__.pop(method, None)
        self._allow(1)

    def _allow(self, buffers: int) -> None:
        """Let FSDP keep several inputs of reduce-scatters, where torch can: from 2.13 on."""
        for each in (self._inner, self._inner.comm_ctx):
            if hasattr(each, "reduce_scatter_max_input_buffers"):
                each.reduce_scatter_max_input_buffers = max(buffers, self._buffers)

    def reads_late(self, output: torch.Tensor) -> bool:
        """True if FSDP only makes gradients that are views of a reduce-scatter's output, and reads
        no element of it before the backward pass is over."""
        inner = self._inner
        shards = [inner.fsdp_params[index].sharded_param for index in self.used]
        return (
            self.device.type == "cpu"  # where no stream orders the reads
            and output.dtype == inner._orig_dtype != torch.float16
            and not self.replicated
            and not getattr(inner, "force_sum_reduction_for_comms", False)
            and all(shard.grad is None for shard in shards)
            and not any(getattr(shard, "_post_accumulate_grad_hooks", None) for shard in shards)
        )

    @property
    def divisor(self) -> float:
        """Divisor of gradients that was set by `set_gradient_divide_factor`."""
        return float(self._inner.gradient_divide_factor)

    def _post_backward(
        self, own: Callable[..., None], began: Callable[[], None], *args: Any
    ) -> None:
        """FSDP's own, after a note of the parameters whose gradients it takes and sends."""
        inner = self._inner
        if inner.reduce_grads:
            began()
            self._send_held()
        unused = getattr(inner, "reduce_scatter_unused_params", False)
        self.used = tuple(
            index
            for index, each in enumerate(inner.fsdp_params)
            if hasattr(each, "_unsharded_param")
            and (_gradient(each) is not None or (unused and each.unsharded_param.requires_grad))
        )
        own(*args)

    def _send_held(self) -> None:
        """Have FSDP send zeros for parameters without a gradient in this pass whose earlier ones
        were held back, so that these are averaged, too."""
        params = self._inner.fsdp_params
        late = [params[index] for index in self.held if _gradient(params[index]) is None]
        if not (late and self.averages):
            return
        others = (_gradient(each) for each in params if hasattr(each, "_unsharded_param"))
        kind = next((each.dtype for each in others if each is not None), self.gathered)
        for each in late:
            each.unsharded_accumulated_grad = torch.zeros_like(each.unsharded_param, dtype=kind)

    def _reset(self, own: Callable[..., None], ended: Callable[[], None], *args: Any) -> None:
        """FSDP's own, after sums under way have arrived where they belong."""
        ended()
        self.held.clear()
        own(*args)


def _gradient(param: Any) -> torch.Tensor | None:
    """The gradient of a parameter of FSDP that has not been sent."""
    accumulated: torch.Tensor | None = param.unsharded_accumulated_grad
    return param.unsharded_param.grad if accumulated is None else accumulated


@functools.cache
def count_steps() -> None:
    """From now on, count an optimizer's step as a write to each shard: see [Note: weights]."""
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if not torch.compiler.is_compiling():  # torch counts the writes of a compiled step
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        increment_version([each for each in stepped if is_sharded(each)])


def groups_of(model: nn.Module) -> list[Group]:
    """The groups of a model, in the model's order; gathered parameters are freed first.

    Raises ConfigError for a model without `fully_shard`, for collectives that cannot be replaced,
    and for groups on different ranks.
    """
    refuse_older(model)
    parts = {*fsdp_parts(model)}
    if not parts:
        raise ConfigError(
            "the model has no module of FSDP2: call torch.distributed.fsdp.fully_shard on its "
            "layers and on itself, then hipress.shard(model); hipress.wrap is for a model that "
            "every rank holds as a whole"
        )
    reshard(model)
    named = [(name, part) for name, part in model.named_modules() if part in parts]
    groups = [Group(name, part) for name, part in named if _groups(part)]
    first = dist.get_process_group_ranks(groups[0].ranks)
    for group in groups:
        if dist.get_process_group_ranks(group.ranks) != first:
            raise ConfigError(
                f"{group.name!r} is sharded over ranks "
                f"{dist.get_process_group_ranks(group.ranks)}, and {groups[0].name!r} over "
                f"{first}: hipress.shard takes one mesh; call it for each of these modules"
            )
    return groups


def params_of(model: nn.Module, groups: list[Group]) -> list[Param]:
    """The parameters of all groups, frozen ones included, with the shapes of the first rank's
    shards, which are the same on all ranks."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    kinds = kinds_of(model)
    return [
        Param(
            names[parameter][0], index, prod(shape), shape, parameter.dtype, sparse=False,
            device=group.device, others=tuple(names[parameter][1:]),
            kinds=frozenset(kinds.get(parameter, ())),
        )
        for index, (group, parameter, shape) in enumerate(_shards(groups))
    ]  # fmt: skip


def _shards(groups: list[Group]) -> Iterator[tuple[Group, nn.Parameter, tuple[int, ...]]]:
    for group in groups:
        for parameter, shape in zip(group.parameters, group.shapes, strict=True):
            yield group, parameter, shape


def divisor_of(op: object, group: Group) -> float:
    """The divisor of a sum that FSDP asks for by an operation of torch.distributed."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    return group.ranks.size() if op == dist.ReduceOp.AVG else group.divisor


def _groups(part: Any) -> list[Any]:
    """FSDP's groups of a module: none for all but the first of a list of modules, or for one whose
    parameters are all sharded further in. Older torch has at most one."""
    state = part._get_fsdp_state()
    if state._modules[0] is not part:
        return []
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _only_group(name: str, part: Any) -> Any:
    for method, version in _SINCE.items():
        if not hasattr(part, method):
            raise ConfigError(
                f"torch {torch.__version__} has no FSDPModule.{method}, by which hipress.shard "
                f"replaces FSDP2's collectives: torch {version} is the first that has it"
            )
    groups = _groups(part)
    if len(groups) > 1:
        raise ConfigError(
            f"{name!r} has {len(groups)} groups of parameters on different meshes (expert "
            "parallelism, by shard_placement_fn), for which FSDP2 takes no custom collectives: "
            "shard its experts by a fully_shard of their own"
        )
    (group,) = groups
    if not hasattr(group.mesh_info, "shard_process_group"):
        raise ConfigError(
            f"{name!r} is replicated, not sharded: hipress.wrap or hipress.Synchronizer averages "
            "gradients of a model that every rank holds as a whole"
        )
    return group


def _refuse_comms(name: str, comms: tuple[object, ...]) -> None:
    for kind in (type(comm).__name__ for comm in comms):
        if kind in _OWN:
            continue
        if kind.startswith("SymmMem"):
            why = "has collectives in symmetric memory: leave set_symm_mem_for_comm out"
        elif kind.startswith("ProcessGroupAlloc"):
            why = (
                "allocates by its process group: leave "
                "set_allocate_memory_from_process_group_for_comm out"
            )
        else:
            why = f"has a custom collective, {kind}: hipress.shard would take its place"
        raise ConfigError(f"{name!r} {why}")
