"""Ranks of test_synchronizer.py."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress.engine import order
from hipress.session import session_of
from tests.hipress.common import (
    Raised,
    codec,
    data,
    difference,
    digest,
    error_of,
    make,
    raised_by,
    refuses,
    train,
)
from tests.hipress.fakes import Int8


def fit(sync, optimizer, rank, steps, accumulate=1, set_to_none=True):
    """Losses, as those of common.train."""
    losses = []
    for step in steps:
        for micro in range(accumulate):
            x, y = data(rank, accumulate * step + micro)
            loss = nn.functional.mse_loss(sync.module(x), y)
            if micro < accumulate - 1:
                with sync.no_sync():
                    (loss / accumulate).backward()
            else:
                (loss / accumulate).backward()
        losses.append(float(loss.detach()))
        sync.step()
        if optimizer is not None:
            optimizer.step()
        sync.module.zero_grad(set_to_none)
    return losses


def sgd(model, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)


def beside_wrap(rank, world_size, name, cases):
    """Hashes after ten steps with a Synchronizer and with wrap, and both losses; by case."""
    found = {}
    for title, (options, large, training) in cases.items():
        order.LARGE_BYTES = large
        model = make()
        sync = hipress.Synchronizer(model, codec(name), **options)
        losses = fit(sync, sgd(model), rank, range(10), **training)
        hipress.detach(sync)
        ddp = hipress.wrap(make(), codec(name), **options)
        others = train(ddp, rank, range(10), training.get("accumulate", 1))
        found[title] = digest(model), digest(ddp), losses, others
        hipress.detach(ddp)
    return found


def beside_plain(rank, world_size, scope):
    """Difference of ten uncompressed steps from plain DDP."""
    model = make()
    sync = hipress.Synchronizer(model, "none", scope=scope, verify=True)
    fit(sync, sgd(model), rank, range(10))
    plain = DistributedDataParallel(make())
    train(plain, rank, range(10))
    return digest(model), difference(model, plain), hipress.report(sync).measured.steps


def scopes(rank, world_size, name):
    """Hash, losses, and messages per step, by scope."""
    found = {}
    for scope in ("tensor", "bucket", "model"):
        model = make()
        sync = hipress.Synchronizer(model, codec(name), scope=scope)
        losses = fit(sync, sgd(model), rank, range(6))
        engine = session_of(sync).engine
        found[scope] = digest(model), losses[0], losses[-1], engine.counters.jobs // 6
        hipress.detach(sync)
    return found


def doubles(gradient):
    """A gradient of any kind as a float64 tensor."""
    dense = gradient.to_dense()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).double()


class Odd(nn.Module):
    """A tied and a frozen parameter, a sparse gradient, a float16, a transposed, an empty, a
    complex and a float64 parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12, sparse=True)
        self.tied = nn.Linear(12, 12)
        self.again = self.tied
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.sixteen = nn.Linear(12, 12).bfloat16()
        self.turned = nn.Parameter(torch.randn(12, 12).t())
        self.none = nn.Parameter(torch.zeros(0))
        self.long = nn.Parameter(torch.randn(12, dtype=torch.float64))
        self.round_ = nn.Parameter(torch.randn(12, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.again(torch.tanh(self.tied(self.frozen(self.words(x)))))
        hidden = self.sixteen(hidden.bfloat16()).float() @ self.turned
        return self.norm(hidden * self.round_.abs()) * self.long + self.none.sum()


def odd(rank, world_size, name, large):
    """A hash of the broadcast values and one after steps; checks that gradients are the mean of all
    ranks' and of the right kind; losses."""
    order.LARGE_BYTES = large
    torch.manual_seed(rank)
    model = Odd()
    sync = hipress.Synchronizer(model, name, min_size=0, verify=True)
    start = digest(model), float(model.norm.running_mean.sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, close = [], []
    for step in range(4):
        words = torch.arange(8) + 3 * rank + step
        loss = model(words).square().mean()
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        own = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        loss.backward()
        sync.step()
        for (key, parameter), gradient in zip(named.items(), own, strict=True):
            mean, mine = doubles(gradient) / world_size, doubles(parameter.grad)
            dist.all_reduce(mean)
            close.append((key, torch.allclose(mine, mean, atol=1e-2)))
            assert parameter.grad.is_sparse == (key == "words.weight")
            assert parameter.grad.dtype == parameter.dtype
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return start, digest(model), [key for key, good in close if not good], losses


def full_precision(rank, world_size):
    """Distance of float32 averages from the mean, of bfloat16 parameters of which all, or none,
    were told to have such gradients before; an error instead."""
    found = []
    for early in (True, False):
        models = [make().bfloat16(), make().bfloat16()]
        if early:
            _widen(*models)
        sync = hipress.Synchronizer(models[0], "none", min_size=0)
        _widen(*models)
        backwards = [(models[0], rank), *((models[1], each) for each in range(world_size))]
        for model, each in backwards:
            nn.functional.mse_loss(
                model(data(each, 0)[0].bfloat16()).float(), data(each, 0)[1]
            ).backward()
        raised = raised_by(sync.step)
        pairs = zip(*(model.parameters() for model in models), strict=True)
        far = max((a.grad - b.grad / world_size).abs().max().item() for a, b in pairs)
        found.append((raised, far))
    return found


def _widen(*models):
    for model in models:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32


class Heads(nn.Module):
    """Two layers whose gradients come in the order that a rank chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(64, 64) for _ in range(3))

    def losses(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x).square().mean() for layer in (self.one, self.two, self.three)]


def own_order(rank, world_size):
    """Ranks whose backward passes come in different orders, one rank with several of them.

    Returns a hash of gradients by step, the number of steps, and the first layer of the order.
    """
    order.LARGE_BYTES = 64
    torch.manual_seed(0)
    model = Heads()
    sync = hipress.Synchronizer(model, "onebit_group")
    found = []
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        losses = model.losses(x)
        for loss in losses if (step + rank) % 2 else losses[::-1]:
            loss.backward()
        sync.step()
        found.append(gradients(model))
    first = sync._steps._bucket_order._order[0].params[0].name
    return found, hipress.state_dict(sync)["counter"], first


class Met(torch.autograd.Function):
    """A function in whose backward pass all ranks meet, as for a loss that gathers embeddings."""

    @staticmethod
    def forward(context, x):
        return x * 1

    @staticmethod
    def backward(context, gradient):
        met = gradient.sum()
        dist.all_reduce(met)
        return gradient + met


def meeting_within(rank, world_size):
    """Gradients if ranks meet in a backward pass before which one has sent the parameters that the
    other holds back; only `one` is compressed."""
    order.LARGE_BYTES = 64
    torch.manual_seed(0)
    model = Heads()
    sync = hipress.Synchronizer(model, "int4_group", exclude=["two.*", "three.*"])
    found = []
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        hidden = model.two(Met.apply(model.one(x)))
        (hidden if rank and step else model.three(hidden)).square().mean().backward()
        sync.step()
        found.append(gradients(model))
    return found


def gradients(model):
    """The sum of each gradient."""
    return [p.grad.sum().item() for p in model.parameters()]


def second_gradient(rank, world_size):
    """Errors of two backward passes outside no_sync, and of sync.step() after them."""
    sync = hipress.Synchronizer(make(), Int8())
    x, y = data(rank, 0)
    nn.functional.mse_loss(sync.module(x), y).backward()
    second = nn.functional.mse_loss(sync.module(x), y)
    return raised_by(second.backward), raised_by(sync.step)


def changed(rank, world_size):
    """Errors by change to gradients between a backward pass and sync.step()."""

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def take(parameter):
        parameter.grad = None

    def by(alias):
        def clamp(model):
            for parameter in model.parameters():
                alias(parameter.grad)

        return clamp

    found = {}
    for title, before, hook, steps in [
        ("clipped", clip, None, 1),
        ("clamped by .data", by(lambda gradient: gradient.data.clamp_(-1, 1)), None, 1),
        ("clamped by .data later", by(lambda gradient: gradient.data.clamp_(-1, 1)), None, 3),
        ("scaled by .detach()", by(lambda gradient: gradient.detach().mul_(0.5)), None, 3),
        ("scaled by .numpy()", by(lambda gradient: gradient.numpy().__imul__(0.5)), None, 3),
        ("zeroed", nn.Module.zero_grad, None, 1),
        ("zeroed later", nn.Module.zero_grad, None, 2),
        ("taken by an earlier hook", None, "earlier", 1),
        ("taken by a later hook", None, "later", 1),
        ("clipped within no_sync", clip, None, 0),
    ]:
        model = make()
        with contextlib.ExitStack() as hooks:
            if hook == "earlier":
                hooks.callback(model.scale.register_post_accumulate_grad_hook(take).remove)
            sync = hipress.Synchronizer(model, Int8())
            if hook == "later":
                hooks.callback(model.scale.register_post_accumulate_grad_hook(take).remove)
            fit(sync, None, rank, range(steps - 1))
            x, y = data(rank, 0)
            with contextlib.nullcontext() if steps else sync.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
            raised = raised_by(before, model) if before is not None else Raised("none", "")
            found[title] = raised if raised.kind != "none" else raised_by(sync.step)
            hipress.detach(sync)
    return found


def shown_again(rank, world_size):
    """True if gradients can be used after a step that did not end, by its end."""
    found = {}
    for end in ("detach", "failure"):
        model = make()
        sync = hipress.Synchronizer(model, Int8())
        for _ in range(1 if end == "detach" else 2):  # a second gradient is an error
            raised = raised_by(
                nn.functional.mse_loss(model(data(rank, 0)[0]), data(rank, 0)[1]).backward
            )
        if end == "detach":
            hipress.detach(sync)
        assert raised.kind == ("none" if end == "detach" else "SyncError")
        found[end] = all(parameter.grad.norm() > 0 for parameter in model.parameters())
    return found


def refusals(rank, world_size):
    """Attempts that are refused, after which the first Synchronizer is as good as before."""
    model, other = make(), make()
    sync = hipress.Synchronizer(model, "none")
    ddp = DistributedDataParallel(make())
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    sync_, wrap = hipress.Synchronizer, hipress.wrap
    for text, way, module, options in (
        ("pass its .module here", sync_, ddp, {}),
        ("must be a torch.nn.Module", sync_, [1], {}),
        ("synchronizes 'scale' of the model already", sync_, model, {}),
        ("synchronizes 'weight' of the model already", sync_, model.first, {}),
        ("synchronizes '0.scale' of the model already", sync_, nn.Sequential(model), {}),
        ("synchronizes 'scale' of the model already", wrap, model, {}),
        ("Synchronizer takes no ddp_kwargs", sync_, make(), {"ddp_kwargs": {"static_graph": True}}),
        ("did you mean 'optimizer'?", sync_, make(), {"optimiser": 1}),
        (
            'scope="model" needs a compressor',
            sync_,
            make(),
            {"compressor": "auto", "scope": "model"},
        ),
        ("for wrap", hipress.attach, ddp, {"scope": "model"}),
        ("several types", wrap, half, {"scope": "model"}),
        ("'scale' stays uncompressed", wrap, make(), {"scope": "model", "exclude": "scale"}),
        (
            "leave bucket_cap_mb out",
            wrap,
            make(),
            {"scope": "model", "ddp_kwargs": {"bucket_cap_mb": 1}},
        ),
        ("optimizer is a torch.optim.Optimizer", wrap, make(), {"optimizer": model}),
        ("did you mean 'adam'?", sync_, make(), {"optimizer": "adm"}),
        (
            "optimizer=LBFGS: its step may need all gradients at once",
            sync_,
            other,
            {"optimizer": torch.optim.LBFGS(other.parameters())},
        ),
        ("parameters that the model has not", sync_, make(), {"optimizer": sgd(model)}),
        ("takes no ddp_kwargs", sync_, make(), {"ddp_kwargs": {} if rank else None}),
    ):
        refuses(text, way, module, **({"compressor": "none"} | options))
    before = digest(model)
    fit(sync, sgd(model), rank, range(1))
    assert digest(model) != before


def mixed_ways(rank, world_size):
    """A rank wraps while the other one makes a Synchronizer."""
    way = hipress.wrap if rank else hipress.Synchronizer
    return raised_by(way, make(), "none")


def strangers(rank, world_size):
    """The error for a parameter that is freed after the Synchronizer was made; and training with a
    new one, during which a parameter is frozen."""
    model = make()
    model.first.requires_grad_(False)
    sync = hipress.Synchronizer(model, "none")
    fit(sync, sgd(model), rank, range(1))
    model.first.requires_grad_(True)
    freed = raised_by(sync.step)
    hipress.detach(sync)
    sync = hipress.Synchronizer(model, "none")
    model.scale.requires_grad_(False)
    fit(sync, sgd(model), rank, range(2))
    return freed, digest(model)


def states(rank, world_size, name):
    """True if states of wrap and Synchronizer are equal, and each can load the other's."""
    ddp, model = hipress.wrap(make(), codec(name)), make()
    sync = hipress.Synchronizer(model, codec(name))
    train(ddp, rank, range(3), momentum=0)
    fit(sync, sgd(model, 0), rank, range(3))
    mine, theirs = hipress.state_dict(sync), hipress.state_dict(ddp)
    equal = mine.keys() == theirs.keys() and all(
        torch.equal(value, theirs["states"][key][side][which])
        for key, sides in mine["states"].items()
        for side, values in sides.items()
        for which, value in values.items()
    )
    hipress.load_state_dict(sync, theirs)
    hipress.load_state_dict(ddp, mine)
    fit(sync, sgd(model, 0), rank, range(3, 5))
    train(ddp, rank, range(3, 5), momentum=0)
    found = equal, mine["counter"], digest(model), digest(ddp)
    hipress.detach(sync)
    return *found, raised_by(sync.step), raised_by(hipress.report, sync)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


def stepped(rank, world_size, name):
    """Hashes by optimizer, stepped by the Synchronizer and at the end, with two groups and a
    schedule; and the error of optimizer.step()."""
    order.LARGE_BYTES = 64
    found = {}
    for title, make_optimizer in OPTIMIZERS.items():
        digests = []
        for given in (True, False):
            model = make()
            groups = [
                {"params": [model.scale, *model.first.parameters()], "lr": 0.05},
                {"params": [*model.norm.parameters(), *model.second.parameters()]},
                {"params": model.last.parameters()},
            ]
            optimizer = make_optimizer(groups)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            extra = {"optimizer": optimizer} if given else {}
            sync = hipress.Synchronizer(model, codec(name), **extra)
            for step in range(5):
                fit(sync, None if given else optimizer, rank, range(step, step + 1))
                schedule.step()
            digests.append(digest(model))
            if given:
                error = raised_by(optimizer.step)
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
            hipress.detach(sync)
            assert error_of(optimizer.step)[0] == "none"
        found[title] = *digests, error
    return found


class Breaking(Int8):
    """A codec that cannot encode after a certain step."""

    broken = False

    def encode_batch(self, *args, **options):
        if self.broken:
            raise ValueError("broken")
        return super().encode_batch(*args, **options)


def failing(rank, world_size):
    """Errors of the step in which rank 1 cannot encode, of the next one, and of a state."""
    model = make()
    sync = hipress.Synchronizer(model, Breaking())
    fit(sync, sgd(model), rank, range(2))
    x, y = data(rank, 2)
    loss = nn.functional.mse_loss(model(x), y)
    Breaking.broken = rank == 1
    loss.backward()
    first = error_of(sync.step)
    nn.functional.mse_loss(model(x), y).backward()
    found = first, raised_by(sync.step), raised_by(hipress.state_dict, sync)
    dist.barrier()  # no rank leaves before all have the error
    return found


def more(rank, world_size):
    """torch.compile, a graph of the gradients, GradScaler, and a rank without data."""
    found = {}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 3))
    compiled = torch.compile(model, backend="aot_eager")
    sync = hipress.Synchronizer(compiled, "int4_group")
    losses = fit(sync, sgd(model), rank, range(5))
    found["compiled"] = losses[-1] < 2 * losses[0], digest(model)
    x, y = data(rank, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cycle ends with zero_grad
        nn.functional.mse_loss(model(x), y).backward(create_graph=True)
    sync.step()
    found["graph"] = True, gradients(model)
    model.zero_grad()
    x.requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().mean().backward()
    sync.step()
    found["penalty"] = True, gradients(model)
    model.zero_grad()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), sgd(model)
    skipped = []
    for factor in (float("inf") if rank == 1 else 1.0, 1.0):
        before = digest(model)
        scaler.scale(nn.functional.mse_loss(model(x), y) * factor).backward()
        sync.step()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        skipped.append(digest(model) == before)
    found["scaler"] = skipped == [True, False], digest(model)
    if rank == 0:
        nn.functional.mse_loss(model(x), y).backward()
    sync.step()
    found["no data"] = all(p.grad.abs().sum() > 0 for p in model.parameters()), gradients(model)
    return found


def wrapped_as_one(rank, world_size, name):
    """wrap with scope "model", and a Synchronizer: jobs per step, hash, losses."""
    ddp = hipress.wrap(make(), codec(name), scope="model")
    losses = train(ddp, rank, range(4))
    return session_of(ddp).engine.counters.jobs, digest(ddp), losses[-1] < losses[0]


def all_reduced(rank, world_size, names):
    """Results of two calls, their distance from the mean, and errors; by codec."""
    found = {}
    torch.manual_seed(rank)
    given = torch.randn(40, 50)
    mean = given.clone()
    dist.all_reduce(mean)
    mean /= world_size
    for name in names:
        each = []
        for value in (given.clone(), given.t().clone().t(), given.bfloat16()):
            assert hipress.all_reduce(value, name) is value
            each.append((value.double().sum().item(), (value - mean).norm() / mean.norm()))
        found[name] = [total for total, _ in each], [float(far) for _, far in each]
    errors = [
        raised_by(hipress.all_reduce, torch.ones(3), "auto"),
        raised_by(hipress.all_reduce, torch.ones(3, dtype=torch.int32), "none"),
        raised_by(hipress.all_reduce, torch.ones(3 + rank), "none"),
        raised_by(hipress.all_reduce, torch.ones(3), "none", topology=3),
        raised_by(hipress.all_reduce, torch.ones(3), "int4_group", topology=1 + rank),
        raised_by(hipress.all_reduce, torch.ones(3), "topk", strategy="exchange", down="none"),
    ]
    return found, errors


def refused_alone(rank, world_size):
    """The error of an all_reduce whose tensor only rank 1 refuses, the next result, and a check
    that the frame that caught the error was freed."""

    class Local:
        pass

    def caught():
        here = Local()
        value = torch.ones(3, dtype=torch.int32 if rank == 1 else torch.float32)
        return error_of(hipress.all_reduce, value, "none")[0], weakref.ref(here)

    hipress.all_reduce(torch.ones(3), "none")
    kind, frame = caught()
    after = hipress.all_reduce(torch.full((3,), float(rank)), "none")
    gc.collect()
    return kind, after.tolist(), frame() is None


def both_ways(rank, world_size):
    """Errors of the average of four ranks, with 4 bits to the owner and floats back, and by nodes
    of two; with the averages, and the payloads that this rank sent."""
    found = []
    for options in ({}, {"down": None}, {"strategy": "hierarchical", "topology": [[0, 2], [1, 3]]}):
        generator = torch.Generator().manual_seed(rank)
        value = torch.randn(60_000, generator=generator)
        mean = value.clone()
        dist.all_reduce(mean)
        mean /= world_size
        hipress.all_reduce(value, "int4_group", **options)
        found.append((value.double().sum().item(), float((value - mean).norm() / mean.norm())))
    return found


def alone(rank, world_size):
    """Hashes of a single rank's training, with a Synchronizer that steps and without any."""
    plain, model = make(), make()
    optimizer = sgd(plain)
    for step in range(3):
        x, y = data(rank, step)
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    sync = hipress.Synchronizer(model, "onebit_group", optimizer=sgd(model))
    fit(sync, None, rank, range(3))
    with sync.no_sync():
        hipress.load_state_dict(sync, hipress.state_dict(sync))
    installed = hipress.report(sync).installed
    hipress.detach(sync)
    return digest(plain), digest(model), installed, hipress.all_reduce(torch.ones(5), "onebit")


class Gathered(torch.autograd.Function):
    """Rows of a table, whose gradient is unexpectedly sparse."""

    @staticmethod
    def forward(context, table):
        context.shape = table.shape
        return table[:2] * 1

    @staticmethod
    def backward(context, gradient):
        rows = torch.arange(2)[None]
        return torch.sparse_coo_tensor(rows, gradient, context.shape)


def unforeseen(rank, world_size):
    """Error for a sparse gradient of a dense parameter."""
    model = nn.Linear(4, 4, bias=False)
    sync = hipress.Synchronizer(model, "none")
    Gathered.apply(model.weight).sum().backward()
    return raised_by(sync.step)
