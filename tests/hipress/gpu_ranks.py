"""Ranks of test_gpus.py: two train on one GPU, on one each, or on emulated devices."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate

import hipress
from hipress import codecs, compat, optim, session
from hipress.choose import levels, rules, search
from hipress.codecs import compile_codec
from hipress.model.devices import Placement
from tests import gpus
from tests.hipress import device_plan_ranks, group_ranks, sharding_ranks
from tests.hipress.common import SMALL_BUCKETS, data, digest, error_of, make
from tests.hipress.device_training_ranks import on_device

TRANSPORTS = ("staged", "host", "nccl")
BINDINGS = ("nccl4py", "pynccl")
STEPS = 14


def adamw(model):
    """AdamW whose ranks average momentum from the fifth step on."""
    return optim.AdamW(model.parameters(), lr=0.01, freeze=4)


#: ways to train: arguments of wrap, and the optimizer
WAYS = {
    "onebit_group": ({"compressor": "onebit_group", "strategy": "ps"}, None),
    "topk": ({"compressor": "topk", "ratio": 0.1, "strategy": "exchange"}, None),
    "powersgd": ({"compressor": "powersgd"}, None),
    "AdamW": ({"compressor": "onebit_fine"}, adamw),
    **{name: ({"policy": policy}, None) for name, policy in device_plan_ranks.POLICIES.items()},
    "auto": ({"compressor": "auto"}, None),
}
CAPTURED = ("onebit_group", "topk")


@contextmanager
def there(rank, transport):
    """The device of models. Without a GPU they are on the CPU, and their buckets are copied to an
    emulated one, for which all codecs are compiled."""
    if gpus.HERE:
        torch.use_deterministic_algorithms(True)
        yield gpus.take(rank)
        return
    with ExitStack() as stack:
        if transport == "host":
            placed = Placement(torch.device("cpu"), transport)
            stack.enter_context(mock.patch.object(session, "place", return_value=placed))
        else:
            emulate(stack, rank, transport)
        yield torch.device("cpu")


def emulate(stack, rank, transport):
    """Put plans' codecs on an emulated device, too."""
    made = stack.enter_context(on_device(rank, transport=transport))

    def compiled(name, params, target="cpu"):
        on_it = target == "cuda"
        return made(name, **params) if on_it else compile_codec(name, params, target)

    for module in (codecs, rules, levels, search):
        stack.enter_context(mock.patch.object(module, "compile_codec", compiled))


def trained(rank, size, transport, ways, capture=False, steps=STEPS):
    """A digest of the parameters for each way, and codecs as chosen, or plans as tried."""
    found = {}
    for name in ways:
        with there(rank, transport) as device, ExitStack() as stack:
            given, make_optimizer = WAYS[name]
            if name == "auto":
                device_plan_ranks.quick(stack)
            model = make().to(device)
            optimizer = (make_optimizer or sgd)(model)
            more = {"optimizer": optimizer} if make_optimizer else {}
            ddp = hipress.wrap(
                model, **given, **more, transport=transport, capture=capture, min_size=100,
                timeout=120, ddp_kwargs=SMALL_BUCKETS, verify=capture is False,
            )  # fmt: skip
            automatic = name == "auto"
            labels = fit(ddp, optimizer, rank, device, automatic=automatic, steps=steps)
            tried = [(each.plan, each.verdict) for each in hipress.report(ddp).tried]
            found[name] = digest(model), tried or labels
            hipress.detach(ddp)
    return found


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02)


def fit(ddp, optimizer, rank, device, *, automatic=False, steps=STEPS):
    """Codecs of the largest parameter, as they change. automatic: until the trial is over, and
    some steps more."""
    labels, step, left = [], 0, steps
    while left > 0:
        optimizer.zero_grad()
        x, y = (each.to(device) for each in data(rank, step))
        torch.nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        report = hipress.report(ddp)
        (label,) = {d.codec for d in report.decisions if d.name == "second.weight"}
        labels += [label] if labels[-1:] != [label] else []
        step += 1
        left -= not automatic or report.trial_seconds is not None
    return labels


def lost(rank, size, transport, how, capture=False):
    """The first rank's error, and those after: another rank is killed or stopped, or comes late.

    After the last both wrap another model, and train. Returns its digest.
    """
    store = compat.job_store()
    with there(rank, transport) as device:
        ddp, optimizer = only_compressed(rank, device, transport, capture)
        run(ddp, optimizer, rank, device, 4)
        if rank == size - 1:
            store.set("process", str(os.getpid()))
            leave(how)
        found = error_of(run, ddp, optimizer, rank, device, 3)
        if how == "stopped":
            os.kill(int(store.get("process")), signal.SIGKILL)
        if how in ("killed", "stopped"):
            return found
        store.set(f"over/{rank}", "")
        store.wait([f"over/{each}" for each in range(size)])
        if how == "too late":
            hipress.detach(ddp)
            ddp, optimizer = only_compressed(rank, device, transport, capture)
            run(ddp, optimizer, rank, device, 3)
        return found, digest(ddp.module)


PATIENCE = 12.0  # seconds until a silent rank is an error


def only_compressed(rank, device, transport, capture):
    """A wrapped model, all of whose gradients travel by the engine."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False).to(device)
    ddp = hipress.wrap(
        model, "onebit_group", transport=transport, capture=capture, min_size=1, timeout=PATIENCE
    )
    return ddp, sgd(model)


def run(ddp, optimizer, rank, device, steps):
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(8, 64, generator=generator).to(device)
        ddp(x).square().mean().backward()
        optimizer.step()


def leave(how):
    """End or stop this process, or let the others wait."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(PATIENCE / 4 if how == "late" else 2 * PATIENCE)


def by_nccl(rank, size):
    """Digest and report of a model whose process group is NCCL's, as most users have it."""
    device = gpus.take(rank)
    inner = compat.job_store()
    dist.destroy_process_group()
    store = compat.PrefixStore("nccl", inner)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    model = make().to(device)
    optimizer = sgd(model)
    ddp = hipress.wrap(model, "onebit_group", min_size=100, verify=True, timeout=120)
    fit(ddp, optimizer, rank, device)
    found = digest(model), str(hipress.report(ddp))
    hipress.detach(ddp)
    return found


def shards(rank, size):
    """Losses, and a digest of the weights as ranks use them, of a model of FSDP2: by its own
    collectives, by hipress's uncompressed, and by compressed ones."""
    mesh, found = None, []
    plain, packed = dict.fromkeys(("reduce_scatter", "all_gather"), "none"), {"min_size": 0}
    with there(rank, "nccl") as device:
        if gpus.HERE:
            mesh = dist.DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")
        for options in (None, {**plain, "exclude": ()}, packed):
            model = sharding_ranks.sharded(sharding_ranks.Net().to(device), mesh=mesh)
            if options is not None:
                hipress.shard(model, **options)
            losses = sharding_ranks.fit(model, rank, 8)
            found.append((losses, sharding_ranks.gathered(model)))
            if options is not None:
                hipress.detach(model)
    return found


def replicas(rank, size):
    """Losses of a model that FSDP2 replicates: by NCCL, by a group hipress that compresses nothing,
    and by one that does; if the ranks' weights are equal, and the group's report."""
    device, found = gpus.take(rank), []
    for options in (None, hipress.GroupOptions("none"), hipress.GroupOptions(min_size=1024)):
        name = "nccl" if options is None else "hipress"
        group = dist.new_group(backend=name, pg_options=options)
        mesh = dist.DeviceMesh.from_group(group, device.type, mesh_dim_names=("replicate",))
        model = group_ranks.by_layer(replicate, mesh)
        losses = group_ranks.fit(model, rank, 12, micro=2)
        equal = group_ranks.same_on_all(group_ranks.weights(model), group)
        found.append((losses, equal, "" if options is None else str(hipress.report(group))))
    return found


def composed(rank, size, way):
    """Losses and a digest of a model that is compiled, or trained in float16 with a GradScaler.

    Two micro-batches a step, and clipping.
    """
    device, losses = gpus.take(rank), []
    model = make().to(device)
    optimizer = sgd(model)
    ddp = hipress.wrap(model, "onebit_group", min_size=100, timeout=120, transport="nccl")
    module, half = torch.compile(ddp) if way == "compiled" else ddp, way == "scaled"
    scaler = torch.amp.GradScaler(device.type, enabled=half)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = (each.to(device) for each in data(rank, 2 * step + micro))
            mixed = torch.autocast(device.type, torch.float16, enabled=half)
            with ddp.no_sync() if micro == 0 else nullcontext(), mixed:
                loss = torch.nn.functional.mse_loss(module(x), y)
                scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    hipress.detach(ddp)
    return losses, digest(model)
