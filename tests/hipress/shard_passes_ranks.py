"""Ranks of test_shard_passes.py: sharded models, and backward passes in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import hipress
from casync.errors import PayloadError
from casync.runtime.executor import Executor
from hipress.model.shards import local
from tests.hipress.common import raised_by
from tests.patience import SILENCE

WIDE = 64
SCALES = [2.0**16] * 3 + [2.0**17, 2.0**14, 2.0**10, 2.0**10]


class Branches(nn.Module):
    """A model of which each pass uses some branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE)
        self.left, self.right = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor, uses: Sequence[str] = ("left", "right")) -> torch.Tensor:
        y = self.norm(self.first(x)).relu()
        for name in uses:
            y = y + getattr(self, name)(x)
        return y.square().mean()


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(8, WIDE, generator=torch.Generator().manual_seed(10 * number + rank))


def sharded(mesh=None, *, layers: bool = True) -> nn.Module:
    model = Branches()
    for part in model.children() if layers else ():
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def replicated(codec, *, layers: bool = True, **options) -> nn.Module:
    """A model whose replicas hipress averages; each has all shards on a rank."""
    mesh = grid()
    return hipress.shard(
        sharded(mesh["shard"], layers=layers), reduce_scatter=None, all_gather=None, replicas=codec,
        replica_group=mesh["replicate"].get_group(), timeout=60, **options,
    )  # fmt: skip


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else local(p.grad).clone()
        for name, p in model.named_parameters()
    }


def values(model: nn.Module) -> list[list[float]]:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return [local(p).detach().flatten().tolist() for p in model.parameters()]


def scaled(rank, world_size):
    """Weights after training without a GradScaler and with one whose scale changes, by codec of
    replicas, or of gradients if without states."""
    found = {}
    for codec in ({"compressor": "topk", "ratio": 0.1}, "onebit_group", "fp16"):
        found[str(codec)] = []
        for scales in (None, SCALES):
            if codec == "fp16":  # its range is narrow
                model = hipress.shard(fully_shard(Branches()), reduce_scatter=codec, min_size=0)
            else:
                model = replicated(codec, min_size=0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            scaler = torch.amp.GradScaler(
                "cpu", init_scale=(scales or [1.0])[0], enabled=scales is not None
            )
            for step, scale in enumerate([*(scales or [1.0] * len(SCALES))[1:], 1.0]):
                optimizer.zero_grad()
                loss = model(batch(step, rank))
                if scales and step == 4:  # a step that overflows is left out
                    scaler.scale(loss * float("inf")).backward()
                    scaler.step(optimizer)
                    scaler.update(scale)
                    optimizer.zero_grad()
                    loss = model(batch(step, rank))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update(scale)
            found[str(codec)].append(values(model))
            hipress.detach(model)
    return found


def held(rank, world_size, layers):
    """Largest relative error of a gradient, by branches of the passes, of which the last one alone
    averages over the replicas; True in place of it if a gradient is missing."""
    found = {}
    for passes in (
        (("left",), ("right",)),
        (("left",), ("left", "right")),
        (("left", "right"), ("left",)),
        (("left",), (), ("right",), ("left",)),
    ):
        alone = Branches()
        for other in range(world_size):
            for number, uses in enumerate(passes):
                (alone(batch(number, other), uses) / world_size).backward()
        model = replicated("none", layers=layers, exclude=())
        for number, uses in enumerate(passes):
            model.set_requires_all_reduce(number == len(passes) - 1)
            model(batch(number, rank), uses).backward()
        pairs = zip(gradients(model).values(), gradients(alone).values(), strict=True)
        found[str(passes)] = max(
            True if ours is None else ((ours - right).norm() / right.norm()).item()
            for ours, right in pairs
        )
        hipress.detach(model)
    return found


def stop(*_: object) -> None:
    raise RuntimeError("ends a pass")


def dropped(rank, world_size, of):
    """True by way if gradients are FSDP2's own after micro-batches that were given up; and the
    error of a state between them. of: replicas, or shards."""
    found, errors = {}, {}
    for way in ("forward", "backward"):
        steps = []
        for ours in (False, True):
            if of == "replicas":
                model = replicated("none", exclude=()) if ours else sharded(grid())
            else:
                model = sharded()
                if ours:
                    hipress.shard(model, reduce_scatter="none", all_gather="none", exclude=())
            model.set_requires_all_reduce(False)
            model(batch(5, rank)).backward()
            if ours and of == "replicas":
                errors[way] = raised_by(hipress.state_dict, model).message
            model.set_requires_all_reduce(True)
            if way == "backward":
                handle = model.left.register_full_backward_pre_hook(stop)
                raised_by(model(batch(6, rank)).backward)
                handle.remove()
            model.reset_iter_state()
            model.zero_grad(set_to_none=False)
            model(batch(0, rank)).backward()
            steps.append(gradients(model))
            if ours:
                hipress.detach(model)
        found[way] = all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])
    return found, errors


def loaded(rank, world_size):
    """True if a step is as in a new model after a state was loaded between micro-batches."""
    steps = []
    for between in (False, True):
        model = replicated("none", exclude=())
        saved = hipress.state_dict(model)
        if between:
            model.set_requires_all_reduce(False)
            model(batch(5, rank)).backward()
            model.set_requires_all_reduce(True)
            hipress.load_state_dict(model, saved)
            model.zero_grad()
        model(batch(0, rank)).backward()
        steps.append(gradients(model))
        hipress.detach(model)
    return all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])


def uncompressed(rank, world_size):
    """Gradients of a model whose replicas average a group without a codec."""
    model = replicated("int8_group", min_size=0)  # excludes the norm's, which is a group
    model(batch(0, rank)).backward()
    return [g.tolist() for name, g in gradients(model).items() if name.startswith("norm")]


class Noted(nn.Module):
    """A layer that notes its weights in each forward pass and in the backward pass of that."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.linear, self.nested = nn.Linear(WIDE, WIDE), nested
        self.pairs: list[list[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = [self.linear.weight.detach().clone()]
        self.pairs.append(pair)
        y = checkpoint(self.linear, x, use_reentrant=True) if self.nested else self.linear(x)
        y.register_hook(lambda grad: pair.append(self.linear.weight.detach().clone()) or grad)
        return y.relu()


def noted(nested: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Noted(nested), Noted(nested))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    return hipress.shard(fully_shard(model), min_size=0)


def pipelined(model: nn.Module, rank: int) -> int:
    """Micro-batches, of which the second begins before the first ends; the number of passes."""
    losses = [model(batch(number, rank).requires_grad_()).sum() for number in range(2)]
    losses[0].backward()
    losses.append(model(batch(2, rank).requires_grad_()).sum())
    for loss in losses[1:]:
        loss.backward()
    return 3


def chunked(model: nn.Module, rank: int) -> int:
    """Backward passes of parts of an output."""
    output = model(batch(0, rank).requires_grad_())
    for part in output.chunk(4):
        part.sum().backward(retain_graph=True)
    return 4


def once(model: nn.Module, rank: int) -> int:
    model(batch(0, rank).requires_grad_()).sum().backward()
    return 1


WAYS: dict[str, tuple[bool, Callable[[nn.Module, int], int]]] = {
    "once": (False, once),
    "pipelined": (False, pipelined),
    "chunked": (False, chunked),
    "nested": (True, once),
}


def drawn(rank, world_size, fused):
    """Facts by way: True if forward and backward passes had the same weights; True if a step
    changes the draws of weights that it leaves as they are; passes counted too many; steps; and
    bytes of a step."""
    found = {}
    for way, (nested, run) in WAYS.items():
        model, passes = noted(nested), 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=fused)
        for _ in range(3):
            passes += run(model, rank)
            optimizer.step()
            optimizer.zero_grad()
        same = all(
            torch.equal(before, after)
            for layer in model
            for before, *others in layer.pairs
            for after in others
        )
        each = len(model[0].pairs) // 3
        anew = not torch.equal(model[0].pairs[0][0], model[0].pairs[each][0])
        report = hipress.report(model)
        found[way] = same, anew, report.passes - passes, report.steps, report.bytes_per_step
        hipress.detach(model)
    return found


def settled(rank, world_size, frontend):
    """Numbers of times that a device was waited for, after each of three backward passes; and the
    errors of a pass whose payload it refuses, and of the next one. frontend: shard, or the group
    hipress."""
    if frontend == "shard":
        model = noted()
    else:
        options = hipress.GroupOptions("int8_group", min_size=1024)
        mesh = init_device_mesh(
            "cpu", (2, 1), mesh_dim_names=("replicate", "shard"),
            backend_override={"replicate": ("hipress", options)},
        )  # fmt: skip
        model = sharded(mesh)
    waits, counts, own = [], [], Executor.settle

    def settle(executor: Executor, future=None) -> None:
        waits.append(executor)
        own(executor, future)

    Executor.settle = settle
    for _ in range(3):
        model(batch(0, rank)).sum().backward()
        counts.append(len(waits))

    def refuse(executor: Executor, future=None) -> None:
        raise PayloadError("bucket 'x' of rank 1: a damaged payload")

    Executor.settle = refuse
    errors = [raised_by(model(batch(0, rank)).sum().backward)]
    if frontend == "shard":
        errors.append(raised_by(model, batch(0, rank)))
    return counts, errors


def stepped_in_backward(rank, world_size):
    """True if passes agree on weights that are stepped as soon as they have a gradient."""
    model = noted()
    for parameter in model.parameters():
        own = torch.optim.AdamW([parameter], lr=0.01, fused=True)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    for _ in range(3):
        once(model, rank)
        model.zero_grad()
    pairs = [pair for layer in model for pair in layer.pairs]
    return all(torch.equal(*pair) for pair in pairs), not torch.equal(pairs[0][0], pairs[1][0])


class Adapted(nn.Module):
    """A frozen layer in bfloat16 with an adapter in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x) + self.base(x.to(torch.bfloat16)).to(x.dtype)


def other_types(rank, world_size, kind):
    """True if a model of types that no codec takes trains as FSDP2 alone trains it, bit for bit;
    the codecs by parameter that the report tells, and if it tells of bytes that are left."""
    reduced = torch.float64 if kind == "reduced in float64" else None
    held, report = [], None
    for ours in (False, True):
        torch.manual_seed(0)
        made = Adapted() if kind == "mixed" else nn.Linear(64, 64)
        model = fully_shard(made, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
        if ours:
            hipress.shard(model, min_size=0, timeout=SILENCE)
        if kind == "double":
            model.double()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(2):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + rank))
            model(
                x.to(next(p for p in model.parameters() if p.requires_grad).dtype)
            ).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = hipress.report(model) if ours else None
        held.append([local(each).clone() for each in model.parameters()])
    named = {
        argument: {each.codec for each in decisions}
        for argument, decisions in report.decisions.items()
    }
    return all(map(torch.equal, *held)), named, report.left_bytes > 0
