"""Ranks of test_sharding.py: models of fully_shard, with FSDP2's collectives and hipress's."""

from __future__ import annotations

import atexit
import gc
import hashlib
import logging
import os
import time
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import hipress
from casync.topology import Topology
from hipress import integrations, registry
from hipress.channel import failures, futures
from hipress.model.shards import local
from hipress.sharding import fsdp
from hipress.sharding.sharding import Sharding
from tests.hipress.common import raised_by, refuses
from tests.patience import wait_until


class Block(nn.Module):
    """A layer with a norm, with odd sizes, and a branch that some steps leave out."""

    def __init__(self, recomputed: str = "") -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(33), nn.Linear(33, 70), nn.Linear(70, 33)
        self.branch = nn.Linear(33, 33)
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        if self.recomputed:
            nested = self.recomputed == "in a nested pass"
            return checkpoint(self._forward, x, branch, use_reentrant=nested)
        return self._forward(x, branch)

    def _forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = x + self.second(self.first(self.norm(x)).relu())
        return x + self.branch(x) if branch else x


class Net(nn.Module):
    """Blocks between an embedding and a head, tied or not."""

    def __init__(self, tied: bool = False, recomputed: str = "", uses: int = 1) -> None:
        super().__init__()
        self.uses = uses  # of each block
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 33)
        self.blocks = nn.ModuleList(Block(recomputed) for _ in range(3))
        self.head = nn.Linear(33, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = self.embed(words)
        for block in (each for each in self.blocks for _ in range(self.uses)):
            x = block(x, branch)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), words.flatten())


def sharded(model: nn.Module, **options) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fit(
    model: nn.Module, rank: int, steps: int = 4, *, micro: int = 1, first: int = 0, **how
) -> list[float]:
    """Losses of steps by AdamW. micro: backward passes a step, of which the last one sends; how:
    twice (two that send), partly (all send, the last one between replicas), skips (a branch is left
    out in odd steps), clip."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    device = next(model.parameters()).device
    for step in range(first, first + steps):
        for number in range(micro):
            if micro > 1 and not how.get("twice"):
                some = "all_reduce" if how.get("partly") else "gradient_sync"
                getattr(model, f"set_requires_{some}")(number == micro - 1)
            seed = 1000 * step + 10 * number + rank
            words = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(seed))
            loss = model(words.to(device), branch=not (how.get("skips") and step % 2))
            loss.backward()
        if how.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shards(model: nn.Module) -> list[list[float]]:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return [local(p).detach().flatten().tolist() for p in model.parameters()]


def prefetching(model: nn.Module) -> nn.Module:
    for before, after in zip(model.blocks[:-1], model.blocks[1:], strict=True):
        before.set_modules_to_forward_prefetch([after])
    return model


def frozen(model: nn.Module) -> nn.Module:
    model.blocks[0].first.requires_grad_(False)
    model.embed.requires_grad_(False)
    return model


def summing(model: nn.Module) -> nn.Module:
    model.set_force_sum_reduction_for_comms(True)
    return model


def compiling(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
#: by case: how a model is made, options of fully_shard, and how it is trained
CASES = {
    "steps": (Net, {}, {}),
    "accumulated": (Net, {}, {"micro": 3}),
    "accumulated by sums": (Net, {}, {"micro": 2, "twice": True}),
    "a branch without gradient": (Net, {}, {"skips": True}),
    "clipped": (Net, {}, {"clip": True}),
    "kept gathered": (Net, {"reshard_after_forward": False}, {}),
    "mixed precision": (Net, {"mp_policy": MIXED}, {}),
    "reduced in bfloat16": (Net, {"mp_policy": BFLOAT16}, {"skips": True}),
    "recomputed": (lambda: Net(recomputed="in the pass"), {}, {}),
    "recomputed in a nested pass": (lambda: Net(recomputed="in a nested pass"), {}, {}),
    "columns": (Net, {"shard_placement_fn": lambda p: Shard(p.shape == (33, 70))}, {}),
    "tied": (lambda: Net(tied=True), {}, {}),
    "used twice": (lambda: Net(uses=2), {}, {}),
    "frozen": (lambda: frozen(Net()), {}, {}),
}
AFTER = {"prefetched": prefetching, "sums": summing, "compiled": compiling}  # once it is sharded
FAST = ("accumulated", "a branch without gradient", "mixed precision", "recomputed", "tied")
SLOW = tuple(case for case in (*CASES, *AFTER) if case not in FAST)


def beside_native(rank, world_size, cases):
    """Losses and shards by case, of FSDP2 alone and of hipress without compression."""
    found = {}
    for case in cases:
        make, options, how = CASES.get(case, CASES["steps"])
        after, pair = AFTER.get(case, lambda model: model), []
        for ours in (False, True):
            model = after(sharded(make(), **options))
            if ours:
                hipress.shard(model, reduce_scatter="none", all_gather="none", exclude=())
            pair.append((fit(model, rank, **how), shards(model)))
        report = hipress.report(model)
        found[case] = *pair, report.bytes_sent > 0 and report.passes > 0
        hipress.detach(model)
    return found


def evaluated(rank, world_size):
    """The loss of a trained model in inference mode and outside of it, and of a further step."""
    model, words = hipress.shard(sharded(Net(), mp_policy=MIXED)), torch.arange(8)[None]
    fit(model, rank, 1)
    with torch.inference_mode():
        inside = model(words).item()
    with torch.no_grad():
        outside = model(words).item()
    return inside, outside, fit(model, rank, 1)[0]


def kept_in_halves(rank, world_size):
    """The same for forward passes after which each pair of ranks keeps all weights."""
    pair = []
    for ours in (False, True):
        model = sharded(Net(), reshard_after_forward=2)
        if ours:
            hipress.shard(model, reduce_scatter="none", all_gather="none", exclude=())
        pair.append((fit(model, rank), shards(model)))
    return pair


class InOrder:
    """A reduce-scatter that adds up nodes first, each from the rank at the owner's place on."""

    def __init__(self, nodes: Topology) -> None:
        self.nodes = nodes

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        rank, every = group.rank(), [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(every, input_tensor, group)
        rows, sums = [each.chunk(group.size())[rank] for each in every], []
        for node, leader in zip(self.nodes.nodes, self.nodes.leaders(rank), strict=True):
            others = (rows[other] for other in node if other != leader)
            sums.append(sum(others, rows[leader]))
        mine = sums.pop(self.nodes.node_of[rank])
        torch.div(sum(sums, mine), fsdp.divisor_of(op, self), out=output_tensor)

    @property
    def ranks(self):
        return dist.group.WORLD


def between_nodes(rank, world_size, lists):
    """Losses and shards of FSDP2 that adds up by nodes, and of hipress without compression; then
    losses, a digest of gathered weights and strategies with compression."""
    nodes, pair = Topology.of(lists), []
    for ours in (False, True):
        model = sharded(Net())
        if ours:
            hipress.shard(
                model, reduce_scatter="none", all_gather="none", exclude=(), topology=lists
            )
        else:
            for part in (each for each in model.modules() if isinstance(each, FSDPModule)):
                part.set_custom_reduce_scatter(InOrder(nodes))
        pair.append((fit(model, rank, skips=True), shards(model)))
    hipress.detach(model)
    model = hipress.shard(sharded(Net()), topology=lists, min_size=0)
    losses, report = fit(model, rank, 12), hipress.report(model)
    used = [{d.strategy for d in each if d.codec} for each in report.decisions.values()]
    return pair, losses, gathered(model), used


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def between(mesh, codec, **options):
    """A sharded model whose replicas are averaged by hipress."""
    group = mesh["replicate"].get_group()
    model = sharded(Net(), mesh=mesh["shard"])
    return hipress.shard(
        model, reduce_scatter=None, all_gather=None, replicas=codec, replica_group=group, **options
    )


def beside_hsdp(rank, world_size):
    """Losses and shards by case, of HSDP and of hipress without compression."""
    mesh, found = grid(), {}
    for case in ("steps", "a branch without gradient", "partly averaged", "shards"):
        pair = []
        for ours in (False, True):
            if ours and case != "shards":
                model = between(mesh, "none", exclude=())
            else:
                model = sharded(Net(), mesh=mesh)
            if ours and case == "shards":
                hipress.shard(model, reduce_scatter="none", all_gather="none", exclude=())
            if case == "partly averaged":
                losses = fit(model, rank, micro=3, partly=True)
            else:
                losses = fit(model, rank, **CASES.get(case, CASES["steps"])[2])
            pair.append((losses, shards(model)))
        found[case] = pair
        hipress.detach(model)
    return found


def replicas_of_one(rank, world_size):
    """Losses of replicas whose shards are on a rank, of which `topology` tells the nodes."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    return fit(between(mesh, "none", topology=[[0]]), rank)


def replicas(rank, world_size):
    """Losses, shards, and the report of replicas that are averaged at one bit, with a branch that
    some steps leave out; names of states, and the error for those of another rank."""
    mesh = grid()
    model = between(mesh, "onebit_group", min_size=0)
    losses = fit(model, rank, 20, skips=True)
    held = shards(model)
    saved, report = hipress.state_dict(model), hipress.report(model)
    other = raised_by(hipress.load_state_dict, model, {**saved, "place": [0, 5, 0, 2]})
    return losses, held, report.to_dict(), sorted(saved["states"]), other


def gathered(model: nn.Module) -> str:
    """A digest of the weights as a forward pass uses them."""
    digest = hashlib.sha256()
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            for parameter in part.parameters():
                if not hasattr(parameter, "to_local"):
                    digest.update(str(parameter.detach().flatten().tolist()).encode())
            part.reshard()
    return digest.hexdigest()


def compressed(rank, world_size):
    """Losses; a digest of gathered weights; True if gathering leaves shards as they are, and if a
    model without owner is freed; and the report."""
    model = hipress.shard(sharded(Net()), rules={"head.*": "int8_group"}, min_size=0)
    losses = fit(model, rank, 12)
    before = shards(model)
    digest = gathered(model)
    exact = shards(model) == before
    report, logged = hipress.report(model), integrations.scalars(model)
    assert logged["hipress/bytes"] == report.bytes_per_step
    whole = weakref.ref(model)
    del model
    gc.collect()
    wait_until(lambda: whole() is None)  # a lane may have the last reference
    return losses, digest, exact, report.to_dict(), str(report)


def slow_at_last(rank, world_size, detaches):
    """The last step of rank 1 waits long for rank 2, while rank 0 has all and ends, after it has
    detached or in order. Losses of three steps."""
    failures.LOOK, futures.POLL_SECONDS = 0.01, 0.05
    model = hipress.shard(sharded(Net()), all_gather=None, min_size=0, timeout=60)
    executor, received = (
        registry.get(model, Sharding).connections["reduce_scatter"].channel._executor,
        [],
    )

    def delay(task):
        if rank == 1 and task.startswith("recv") and "peer=2" in task:
            received.append(task)
            if len(received) == 3 * in_a_step:
                time.sleep(3.0)

    object.__setattr__(executor.options, "delay", delay)
    in_a_step = 0
    losses = fit(model, rank, 1)
    in_a_step = len(received)
    losses += fit(model, rank, 2)
    if rank == 0 and detaches:
        hipress.detach(model)
        os._exit(0)
    if rank == 0:
        atexit._run_exitfuncs()
    return losses


def refused(rank, world_size):
    """Arguments and models that are refused."""
    mesh, made = init_device_mesh("cpu", (world_size,)), sharded(Net())
    other = sharded(Net())
    other.set_custom_reduce_scatter(lambda **_: None)
    symmetric = sharded(Net())
    symmetric.set_custom_all_gather(type("SymmMemAllGather", (), {})())
    own, first = [dist.new_group([each]) for each in range(world_size)], Net()
    fully_shard(first.blocks[0], mesh=dist.DeviceMesh.from_group(own[rank], "cpu"))
    fully_shard(first, mesh=mesh)
    hooked, group = sharded(Net()), dist.group.WORLD
    hooked.blocks[1].set_all_reduce_hook(lambda output: None)
    both = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    hsdp = sharded(Net(), mesh=both)
    flat = "works on a matrix or in rounds, and a rank's row of a sharded model is flat"
    for text, model, options in (
        (f"reduce_scatter: compressor 'powersgd' {flat}", made, {"reduce_scatter": "powersgd"}),
        (
            f"rule '*.weight': compressor 'powersgd' {flat}",
            made,
            {"rules": {"*.weight": "powersgd"}},
        ),
        ("keeps states (residual), which for reduce_", made, {"reduce_scatter": "onebit_group"}),
        ("payloads that vote", made, {"reduce_scatter": "signsgd"}),
        ("all_gather: unknown compressor 'int8_grup'", made, {"all_gather": "int8_grup"}),
        ("takes no bucket_cap_mb: it is an argument of Distributed", made, {"bucket_cap_mb": 25}),
        ("takes no strategy: a sum goes to the rank", made, {"strategy": "ring"}),
        ("did you mean 'rules'?", made, {"ruels": {}}),
        ("in_flight is a positive number", made, {"in_flight": 0}),
        ("'heads.*' matches no parameter", made, {"exclude": "heads.*"}),
        ("the model must be a torch.nn.Module, got 3", 3, {}),
        ("the model has no module of FSDP2", Net(), {}),
        ("'the model' has a custom collective, function", other, {}),
        ("leave set_symm_mem_for_comm out", symmetric, {}),
        ("'blocks.0' is sharded over ranks", first, {}),
        ("replicas= and replica_group= go together", made, {"replica_group": group}),
        (
            "FSDP2 averages the replicas of this model itself",
            hsdp,
            {"replicas": "int4_group", "replica_group": group},
        ),
        ("'blocks.1' has an all-reduce hook", hooked, {}),
    ):
        refuses(text, hipress.shard, model, **options)
    with mock.patch.dict(fsdp._SINCE, set_custom_all_of_it="2.9"):
        for text in ("has no FSDPModule.set_custom_all_of_it", "torch 2.9 is the first"):
            refuses(text, hipress.shard, made)
    refuses("takes no compressor: name reduce_scatter=", hipress.shard, made, "int4_group")
    refuses("hipress.shard(model) compresses what FSDP2 sends", hipress.wrap, made, "int4_group")
    unequal = {"reduce_scatter": "int8_group"} if rank else {}
    refuses("int4_group", hipress.shard, made, kind="ConfigMismatch", **unequal)
    hipress.shard(made)
    for each in (made, made.blocks[0]):
        refuses("hipress.detach that first", hipress.shard, each)
    refuses("", hipress.load_state_dict, made, {"step": 3}, kind="StateError")
    hipress.detach(made)
    refuses("hipress.shard was not called for this model, or detached", hipress.report, made)


def alone(rank, world_size):
    """Losses, log and report of one rank."""
    log, told = logging.getLogger("hipress"), []
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: told.append(record.getMessage()) or True)
    model = hipress.shard(sharded(Net()))
    losses = fit(model, rank, 2)
    report, saved = hipress.report(model), hipress.state_dict(model)
    hipress.load_state_dict(model, saved)
    hipress.detach(model)
    return losses, told, str(report), report.installed


def parts(rank, world_size):
    """Number of warnings by mesh: of all ranks, and of a rank with averages by nobody, by hipress
    and by FSDP2."""
    log, warned = logging.getLogger("hipress"), []
    log.addFilter(lambda record: record.levelno < logging.WARNING or warned.append(record))
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    replicas = {"replicas": "int4_group", "replica_group": mesh["replicate"].get_group()}
    found = {}
    for name, shape, options in (
        ("whole", init_device_mesh("cpu", (world_size,)), {}),
        ("apart", mesh["shard"], {}),
        ("replicas", mesh["shard"], replicas),
        ("hsdp", mesh, {}),
    ):
        warned.clear()
        hipress.detach(hipress.shard(sharded(Net(), mesh=shape), **options))
        texts = [record.getMessage() for record in warned]
        found[name] = sum("the parts of the job train apart" in text for text in texts)
    return found


def parted(rank, world_size, of):
    """Errors of ranks of which one leaves out a branch: their gradients differ. of: shards, or
    replicas."""
    if of == "shards":
        model = hipress.shard(sharded(Net()), timeout=6)
    else:
        mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
        model = between(mesh, "int4_group", timeout=6)
    fit(model, rank, 1)
    try:
        model(torch.zeros(2, 2, dtype=torch.int64), branch=bool(rank)).backward()
    except hipress.HipressError as error:
        return str(error), getattr(error, "__notes__", [])
