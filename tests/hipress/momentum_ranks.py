"""Ranks of test_momentum.py."""

from __future__ import annotations

import copy
import io
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress import optim
from hipress.choose.tuner import WATCHED
from hipress.session import session_of
from tests.hipress.codec_ranks import logged
from tests.hipress.common import SMALL_BUCKETS, Scaled, data, digest, make, raised_by

CODEC = "onebit_fine"


def adam(model, freeze=4, **options):
    return optim.AdamW(model.parameters(), lr=0.01, freeze=freeze, **options)


def make_optimizer(name, model):
    parameters = model.parameters()
    if name == "sgd":
        return optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01)
    if name == "lion":
        return optim.Lion(parameters, lr=0.001, weight_decay=0.01)
    norm = 0.5 if name == "clipped" else None
    return adam(model, WATCHED, max_norm=norm)  # before "auto" may compress gradients


def backward(model, rank, step, factor=1.0):
    x, y = data(rank, step)
    loss = nn.functional.mse_loss(model(x), y)
    (loss * factor).backward()
    return loss.item()


def fit(ddp, optimizer, rank, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(backward(ddp, rank, step))
        optimizer.step()
    return losses


def ways(rank, world_size, name, codec):
    """Losses, digests, the plan at the end and `phases`, by wrap and by Synchronizer."""
    found = []
    for way in ("wrap", "synchronizer"):
        model = make()
        optimizer = make_optimizer(name, model)
        if way == "wrap":
            ddp = hipress.wrap(model, codec, optimizer=optimizer, ddp_kwargs=SMALL_BUCKETS)
            losses = fit(ddp, optimizer, rank, range(14))
        else:
            ddp = hipress.Synchronizer(model, codec, optimizer=optimizer)
            losses = []
            for step in range(14):
                optimizer.zero_grad()
                losses.append(backward(model, rank, step))
                ddp.step()
                if name == "clipped":  # which needs all gradients before a step
                    optimizer.step()
        report = hipress.report(ddp)
        found.append((losses, digest(model), report.why, phases(report)))
        hipress.detach(ddp)
    return found


def phases(report):
    """Steps, and kinds of gradients that were sent, before and after a freeze."""
    both = [each for each in (report.before_freeze, report.measured) if each is not None]
    return [(m.steps, {kind for kind, sent in m.kinds.items() if sent.ddp_bytes}) for m in both]


def stored(model, optimizer, ddp):
    """The state of all three, as bytes."""
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "hipress": hipress.state_dict(ddp),
    }
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def checkpoints(rank, world_size, at):
    """Digests of ten steps in a row, and of ten with a restart, for which the first rank saves the
    optimizer; the norm that ranks are clipped to."""
    model = make()
    optimizer = adam(model, max_norm=0.05)
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
    fit(ddp, optimizer, rank, range(at))
    state = stored(model, optimizer, ddp)
    fit(ddp, optimizer, rank, range(at, 10))
    hipress.detach(ddp)
    state = torch.load(io.BytesIO(state), weights_only=True)
    kept = [state["optimizer"]]
    dist.broadcast_object_list(kept)
    again = make()
    resumed = adam(again, max_norm=0.05)
    wrapped = hipress.wrap(again, CODEC, optimizer=resumed)
    refused = raised_by(hipress.load_state_dict, wrapped, state["hipress"])
    again.load_state_dict(state["model"])
    resumed.load_state_dict(kept[0])
    hipress.load_state_dict(wrapped, state["hipress"])
    fit(wrapped, resumed, rank, range(at, 10))
    return digest(model), digest(again), refused, optimizer.rank_norm


def torchs_states(rank, world_size, way):
    """Digests of ten steps in a row, and of ten with a restart by torch's states of an optimizer,
    which a Synchronizer steps or which is wrapped."""

    def made():
        model = make()
        optimizer = adam(model)
        if way == "wrap":
            ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
            return ddp, optimizer, ddp, optimizer.step
        sync = hipress.Synchronizer(model, CODEC, optimizer=optimizer)
        return model, optimizer, sync, sync.step

    def run(model, optimizer, step, numbers):
        for number in numbers:
            optimizer.zero_grad()
            backward(model, rank, number)
            step()

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer, hip, step = made()
    run(model, optimizer, step, range(6))
    weights, moments = copy.deepcopy(get_state_dict(model, optimizer, options=flat))
    own = hipress.state_dict(hip)
    run(model, optimizer, step, range(6, 10))
    hipress.detach(hip)
    again, resumed, hip, step = made()
    get_state_dict(again, resumed, options=flat)  # into which a checkpoint would be read
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=moments, options=flat)
    hipress.load_state_dict(hip, own)
    run(again, resumed, step, range(6, 10))
    return digest(model), digest(again)


def norms(rank, world_size, way):
    """The norm that ranks are clipped to after the freeze, and the wanted one, by gradients that
    this rank computes for all."""
    model, twin = make(), make()
    optimizer = adam(model, 6, max_norm=0.05)
    squares, averages, ddp = [], [], None
    if way == "wrap":
        ddp = hipress.wrap(model, "none", optimizer=optimizer, ddp_kwargs=SMALL_BUCKETS)
    sync = hipress.Synchronizer(model, "none", optimizer=optimizer) if ddp is None else None
    for step in range(8):
        twin.load_state_dict(model.state_dict())
        every = []
        for each in range(world_size):
            twin.zero_grad()
            backward(twin, each, step)
            every.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
        squares.append([float(g.square().sum()) for g in every])
        optimizer.zero_grad()
        backward(model if ddp is None else ddp, rank, step)
        if sync is not None:
            sync.step()
        averages.append(sum(float(p.grad.square().sum()) for p in model.parameters()))
        optimizer.step()
    middle = [(max(some) + min(some)) / 2 for some in squares]
    wanted = [0.9 * some[0] + some[4] for some in (middle, averages)]
    return optimizer.rank_norm, 0.05 * (wanted[0] / wanted[1]) ** 0.5


def scaled(rank, world_size):
    """Steps that overflow on rank 1, one as a whole and one in some elements: compares parameters,
    momentum and feedback before and after them, and later steps with those of a run without them,
    in other scales."""
    digests = []
    for overflows in (False, True):
        model = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        optimizer = adam(model, 2, max_norm=0.5, scaler=scaler)
        ddp = hipress.wrap(model, CODEC, optimizer=optimizer, ddp_kwargs=SMALL_BUCKETS)
        parts = [1.0]  # factor of a few elements
        model.second.weight.register_hook(lambda given, parts=parts: _times(given, parts[0]))
        for step in range(9):
            for factor in (float("inf"), 1.0) if overflows and step in (5, 7) else (1.0,):
                before = _held(model, optimizer, ddp)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(ddp(data(rank, step)[0]), data(rank, step)[1])
                parts[0] = factor if rank == 1 else 1.0
                scaler.scale(loss * (parts[0] if step == 5 else 1.0)).backward()
                scaler.step(optimizer)
                if factor > 1:
                    digests.append(_held(model, optimizer, ddp) == before)
                scaler.update()
        digests.append(digest(model))
        hipress.detach(ddp)
    return digests


def _times(gradient, factor):
    changed = gradient.clone()
    changed[:2] *= factor
    return changed


def _held(model, optimizer, ddp):
    moments = [optimizer.state[p]["exp_avg"].sum().item() for p in optimizer.state]
    state = hipress.state_dict(ddp)["states"]
    residuals = [
        values.double().abs().sum().item()
        for sides in state.values()
        for arrays in sides.values()
        for values in arrays.values()
    ]
    return digest(model), moments, residuals


def accumulated(rank, world_size):
    """Distance between two micro-batches a step under no_sync and one batch of both."""
    models = []
    for micro in (True, False):
        model = make()
        optimizer = adam(model, 2)
        ddp = hipress.wrap(model, "none", optimizer=optimizer)
        for step in range(8):
            optimizer.zero_grad()
            batches = [data(rank, 2 * step), data(rank, 2 * step + 1)]
            if micro:
                with ddp.no_sync():
                    (nn.functional.mse_loss(ddp(batches[0][0]), batches[0][1]) / 2).backward()
                (nn.functional.mse_loss(ddp(batches[1][0]), batches[1][1]) / 2).backward()
            else:
                x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
                nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        models.append(model)
        hipress.detach(ddp)
    pairs = zip(*(m.parameters() for m in models), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


class Gated(nn.Module):
    """A part that some steps leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.maybe = nn.Linear(7, 300), nn.Linear(300, 3)
        self.last = nn.Linear(300, 3)

    def forward(self, x, gate):
        hidden = torch.tanh(self.always(x))
        return self.last(hidden) + (self.maybe(hidden) if gate else 0)


def unused(rank, world_size, way):
    """Momentum, feedback and values of a layer before and after a step in which no rank used it;
    and a digest of all after a step in which only rank 0 used it."""
    model = Gated()
    optimizer = adam(model, 2)
    if way == "wrap":
        kwargs = {"find_unused_parameters": True, **SMALL_BUCKETS}
        ddp = hipress.wrap(model, CODEC, optimizer=optimizer, ddp_kwargs=kwargs)
    else:
        ddp = hipress.Synchronizer(model, CODEC, optimizer=optimizer)

    def step(number, gate):
        x, y = data(rank, number)
        optimizer.zero_grad()
        (ddp if way == "wrap" else model)(x, gate).sub(y).square().mean().backward()
        ddp.step() if way != "wrap" else optimizer.step()

    def held():
        momentum = optimizer.state[model.maybe.weight]["exp_avg"].clone()
        state = hipress.state_dict(ddp)["states"]["maybe.weight"]
        kept = [values.clone() for arrays in state.values() for values in arrays.values()]
        return [momentum, model.maybe.weight.detach().clone(), *kept]

    for number in range(6):
        step(number, True)
    before = held()
    step(6, False)
    after = held()
    stays = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    step(7, rank == 0)
    step(8, True)
    return stays, digest(model)


def mistakes(rank, world_size):
    """Error messages, by mistake."""
    found = {}
    model = make()
    optimizer = adam(model, 2)
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
    found["twice"] = raised_by(hipress.wrap, make(), CODEC, optimizer=optimizer)
    fit(ddp, optimizer, rank, range(4))
    backward(ddp, rank, 4)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    found["clipped"] = raised_by(optimizer.step)
    found["no step"] = raised_by(backward, ddp, rank, 5)
    for title in (".data", ".numpy()"):
        model = make()
        optimizer = adam(model, 2)
        ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
        fit(ddp, optimizer, rank, range(2))
        backward(ddp, rank, 2)
        gradient = model.second.weight.grad
        rows = gradient.data if title == ".data" else gradient.numpy()
        rows[:100] = 0
        found[title] = raised_by(optimizer.step)
    for codec in ("dgc", "int4_group"):
        found[codec] = raised_by(hipress.wrap, make(), codec, optimizer=adam(make()))
    policy = hipress.Warmup("topk", ratios=(0.1, 0.01), steps=5)
    found["policy"] = raised_by(hipress.wrap, make(), policy=policy, optimizer=adam(make()))
    model = make()
    torchs = torch.optim.AdamW(model.parameters())
    found["torch's"] = raised_by(hipress.wrap, model, CODEC, optimizer=torchs, freeze=4)
    accepted = {"optimizer": torchs, "accept_loss": 0.01 * (1 + rank)}
    found["accepted"] = raised_by(hipress.wrap, model, **accepted)
    for way in (hipress.wrap, hipress.Synchronizer, attach):
        found[f"torch's of others by {way.__name__}"] = raised_by(way, make(), optimizer=torchs)
        rates = torch.optim.SGD([{"params": model.parameters(), "lr": 0.1 * (1 + rank)}], 0.1)
        found[f"rates by {way.__name__}"] = raised_by(way, model, CODEC, optimizer=rates)
    others = adam(make())
    found["of others"] = raised_by(hipress.wrap, make(), CODEC, optimizer=others)
    for way in ("wrap", "Synchronizer"):
        model = make()
        module = getattr(hipress, way)(model, CODEC)
        forgotten = adam(model, 100)
        found[f"forgotten by {way}"] = raised_by(_steps_of, module, model, forgotten, rank)
    model = make()
    sync = hipress.Synchronizer(model, CODEC)
    _steps_of(sync, model, torch.optim.SGD(model.parameters(), lr=0.01), rank)
    found["second step"] = raised_by(sync.step)
    found["ranks"] = raised_by(hipress.wrap, make(), CODEC, optimizer=adam(make(), 4 + rank))
    return found


def attach(model, *args, **options):
    """hipress.attach to DDP's module of a model."""
    return hipress.attach(DistributedDataParallel(model), *args, **options)


def _steps_of(module, model, optimizer, rank):
    """Two steps by wrap or Synchronizer."""
    synchronizer = isinstance(module, hipress.Synchronizer)
    for step in range(2):
        model.zero_grad()
        backward(model if synchronizer else module, rank, step)
        if synchronizer:
            module.step()
        optimizer.step()


def apart(rank, world_size):
    """Rank 1 skips a step of its optimizer before the freeze."""
    model = make()
    optimizer = adam(model)
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
    fit(ddp, optimizer, rank, range(2))
    optimizer.zero_grad()
    backward(ddp, rank, 2)
    if rank == 0:
        optimizer.step()
    return raised_by(fit, ddp, optimizer, rank, range(3, 8))


def early(rank, world_size):
    """Warnings at a freeze that is due before measurements would have it."""
    found = []
    logging.getLogger("hipress").addFilter(lambda record: found.append(record.getMessage()) or True)
    model = make()
    optimizer = adam(model, 4)
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
    fit(ddp, optimizer, rank, range(6))
    return [message for message in found if "frozen" in message]


def warming(rank, world_size):
    """A freeze while the learning rate rises."""
    model = make()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 8)
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer)

    def run():
        for step in range(8):
            fit(ddp, optimizer, rank, range(step, step + 1))
            schedule.step()

    return raised_by(run)


def halves(rank, world_size):
    """Losses and a digest of bfloat16 parameters."""
    model = make().bfloat16()
    optimizer = adam(model)
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
    losses = []
    for step in range(12):
        x, y = (each.bfloat16() for each in data(rank, step % 3))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, digest(model)


def grown(rank, world_size, saved):
    """On more ranks than saved a state: momentum and v go on, feedback starts at zero."""
    saved = torch.load(io.BytesIO(saved), weights_only=True)  # tensors that ranks do not share
    model = make()
    optimizer = adam(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
    hipress.load_state_dict(ddp, saved["hipress"], strict=False)
    label = session_of(ddp).current_plan.label
    return fit(ddp, optimizer, rank, range(8, 12)), digest(model), label


def saved(rank, world_size):
    """The states after eight steps."""
    model = make()
    optimizer = adam(model)
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer)
    fit(ddp, optimizer, rank, range(8))
    return stored(model, optimizer, ddp)


def float64_layer():
    model = make()
    model.second.double()
    forward = model.second.forward
    model.second.forward = lambda x: forward(x.double()).float()
    return model


def with_empty_parameters():
    torch.manual_seed(0)
    return nn.Sequential(Scaled(True), nn.Linear(7, 64), nn.Linear(64, 64), nn.Linear(64, 3))


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    model[2].weight = model[0].weight
    return model


def subgroup(model, optimizer):
    group = dist.new_group([0, 1])
    return hipress.wrap(model, CODEC, optimizer=optimizer, process_group=group, verify=True)


def mesh(model, optimizer):
    devices = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    kwargs = {"device_mesh": devices["dp"]}
    return hipress.wrap(model, CODEC, optimizer=optimizer, ddp_kwargs=kwargs, verify=True)


def wrapped(**options):
    """A way to wrap a model whose averages are compared between ranks."""
    return lambda model, optimizer: hipress.wrap(
        model, CODEC, optimizer=optimizer, verify=True, **options
    )


def attached(model, optimizer):
    return hipress.attach(DistributedDataParallel(model), CODEC, optimizer=optimizer, verify=True)


def compiled(model, optimizer):
    return torch.compile(wrapped()(model, optimizer), backend="eager")


#: what DDP's tests try, by name: a model, and the way to wrap it
MODES = {
    "static graph": (make, wrapped(ddp_kwargs={"static_graph": True})),
    "bucket views": (make, wrapped(ddp_kwargs={"gradient_as_bucket_view": True})),
    "rebuilt buckets": (make, wrapped(ddp_kwargs=SMALL_BUCKETS)),
    "bucket scope": (make, wrapped(scope="bucket", ddp_kwargs=SMALL_BUCKETS)),
    "model scope": (make, wrapped(scope="model")),
    "unused": (lambda: make(unused=True), wrapped(ddp_kwargs={"find_unused_parameters": True})),
    "float64": (float64_layer, wrapped()),
    "empty": (with_empty_parameters, wrapped()),
    "tied": (tied, wrapped()),
    "attach": (make, attached),
    "compile": (make, compiled),
    "mesh": (make, mesh),
    "subgroup": (make, subgroup),
    "ring": (make, wrapped(strategy="ring")),
    "exchange": (make, wrapped(strategy="exchange")),
    "checksum": (make, wrapped(checksum=True)),
    "excluded": (make, wrapped(exclude="*.bias")),
    "rules": (make, wrapped(rules={"last.*": "topk"})),
}


def modes(rank, world_size):
    """First and last loss, and a digest of all parameters, after a freeze, by mode."""
    found = {}
    for name, (build, wrap) in MODES.items():
        model = build()
        optimizer = adam(model, 4)
        losses = fit(wrap(model, optimizer), optimizer, rank, range(12))
        assert optimizer.averaging, name
        found[name] = losses[0], losses[-1], digest(model)
    return found


def joins(rank, world_size):
    """DDP's join with averages of momentum: a rank without data takes no step of its optimizer."""
    model = make()
    optimizer = adam(model, 2)
    ddp = hipress.wrap(model, CODEC, optimizer=optimizer, timeout=20)

    def run():
        with ddp.join():
            fit(ddp, optimizer, rank, range(4 + 4 * rank))

    return raised_by(run)


def first_line(rank, world_size):
    """Levels and texts that `wrap` logs."""
    model = make()
    return logged(model, CODEC, optimizer=adam(model))


def unmeasured(rank, world_size, name):
    """Reason in the report, losses and digest with "auto" and an optimizer without evidence."""
    model = make()
    optimizer = make_optimizer(name, model)
    ddp = hipress.wrap(model, optimizer=optimizer)
    losses = fit(ddp, optimizer, rank, range(8))
    return hipress.report(ddp).why, losses, digest(model)


LIMITS = {
    "none": {},
    "of ranks, out of reach": {"max_norm": 1e-3, "rank_norm": 1e6},
    "of both": {"max_norm": 0.2},
    "of ranks": {"max_norm": 1e-3, "rank_norm": 0.2},
}


def limits(rank, world_size):
    """Digests after training with norms that gradients are clipped to, by LIMITS."""
    found = {}
    for name, norms in LIMITS.items():
        model = make()
        optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9, **norms)
        ddp = hipress.wrap(model, "none", optimizer=optimizer)
        fit(ddp, optimizer, rank, range(5))
        found[name] = digest(model)
        hipress.detach(ddp)
    return found
