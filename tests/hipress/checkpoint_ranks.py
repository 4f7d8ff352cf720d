"""Ranks of test_checkpoint.py."""

from __future__ import annotations

import copy
import logging
import os
import signal
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import hipress
from hipress import handles
from hipress.codecs import MEAN, REFERENCE
from hipress.ranks import groups
from hipress.session import session_of
from tests.hipress import tuner_ranks
from tests.hipress.common import (
    SMALL_BUCKETS,
    UNREBUILT,
    Raised,
    codec,
    data,
    digest,
    left,
    make,
    raised_by,
    train,
)
from tests.hipress.fakes import Int8
from tests.patience import HANG, SILENCE


def unfit(rank, world_size):
    """Errors of states that do not fit, of which one that fits has the keys of a new one's."""
    ddp = hipress.wrap(make(), codec("int8"))
    template = keys_of(hipress.state_dict(ddp))
    train(ddp, rank, range(3), momentum=0)
    state = hipress.state_dict(ddp)
    assert keys_of(state) == template  # for torch.distributed.checkpoint
    assert state["counter"] == 3
    assert {side for sides in state["states"].values() for side in sides} == {
        "aggregator", "worker"
    }  # fmt: skip
    return state_errors(ddp, state)


def through_dcp(rank, world_size, path, cases):
    """Sums of squares of a saved state's values, and of those that torch.distributed.checkpoint
    loads into new objects; by case."""
    found = {}
    for title, (way, scope) in cases.items():

        def new(way=way, scope=scope):
            model = make()
            return model, way(model, codec("int8"), scope=scope, min_size=0)

        model, made = new()
        for step in range(3):
            x, y = data(rank, step)
            nn.functional.mse_loss((made if way is hipress.wrap else model)(x), y).backward()
            if way is not hipress.wrap:
                made.step()
        saved, key = hipress.state_dict(made), f"rank{rank}"
        dcp.save({key: saved}, checkpoint_id=f"{path}/{title}")
        _, other = new()
        loaded = {key: hipress.state_dict(other)}
        dcp.load(loaded, checkpoint_id=f"{path}/{title}")
        hipress.load_state_dict(other, loaded[key])
        found[title] = squares(saved), squares(hipress.state_dict(other))
    return found


def changing_through_dcp(rank, world_size, path):
    """A state of a plan that a trial kept, and one of a policy's second level, loaded by
    torch.distributed.checkpoint into sessions that have not reached them. Returns, by way, the
    error, the saved state and the loaded one."""
    tuner_ranks.quick([Int8()])
    ways = {"auto": {}, "policy": {"policy": hipress.Warmup("topk", (0.25, 0.1), steps=2)}}
    found, key = {}, f"rank{rank}"
    for way, given in ways.items():
        ddp = hipress.wrap(make(), **given)
        if way == "auto":
            engine = session_of(ddp).engine
            costs = tuner_ranks.fast_codecs(None, ["int8_fake"], tuner_ranks.slow_link())
            plans = engine.chooser._places.first.search.plans(costs)
            engine.resume(0, engine.buckets_of(next(plan for plan in plans if plan.compresses)))
        train(ddp, rank, range(3))
        saved, again = hipress.state_dict(ddp), hipress.wrap(make(), **given)
        dcp.save({key: saved}, checkpoint_id=f"{path}/{way}")
        loaded = {key: hipress.state_dict(again)}
        dcp.load(loaded, checkpoint_id=f"{path}/{way}")
        error = raised_by(hipress.load_state_dict, again, loaded[key])
        found[way] = error, squares(saved), squares(hipress.state_dict(again))
    return found


def squares(state):
    return {
        (name, side): sum(values.square().sum().item() for values in arrays.values())
        for name, sides in state["states"].items()
        for side, arrays in sides.items()
    }


class Loaded(NamedTuple):
    """Errors of loads that do not fit all ranks, and the training after them."""

    apart: Raised  # of two steps
    refused: Raised  # fits rank 0 alone
    kept: bool  # the state from before
    digest: str  # after a training


def load_apart(rank, world_size):
    ddp = hipress.wrap(make(), "randomk", ratio=0.1)
    states = []
    for step in range(3):
        train(ddp, rank, range(step, step + 1))
        states.append(hipress.state_dict(ddp))
    before = str(states[-1])
    apart = raised_by(hipress.load_state_dict, ddp, states[2 - rank])
    refused = raised_by(hipress.load_state_dict, ddp, states[0] | {"place": [0, 2]})
    kept = str(hipress.state_dict(ddp)) == before
    hipress.load_state_dict(ddp, states[0])
    train(ddp, rank, range(1, 4))
    return Loaded(apart, refused, kept, digest(ddp))


def load_late(rank, world_size):
    """Rank 1 loads a state after rank 0 waited in vain; errors, and later training."""
    ddp = hipress.wrap(make(), "randomk", ratio=0.1, timeout=HANG)
    saved = hipress.state_dict(ddp)
    train(ddp, rank, range(2))
    session = session_of(ddp)
    store, session.failures.coordinator = (
        session.coordinator.mailbox.store,
        replace(session.coordinator, timeout=0.1),
    )
    logging.disable(logging.CRITICAL)
    if rank == 1:
        store.wait(["waited"])
    load = raised_by(hipress.load_state_dict, ddp, saved)
    store.set("waited", "")
    kept = session.engine.step == 2
    step = raised_by(train, ddp, rank, range(2, 3))
    return load, kept, step, raised_by(hipress.state_dict, ddp)


def keys_of(state):
    """Keys at all levels."""
    if not isinstance(state, dict):
        return None
    return {key: keys_of(value) for key, value in state.items()}


def state_errors(ddp, state):
    """Messages for states that do not fit; checks that strict=False takes them."""
    found = {}
    codecs = state["codecs"]

    def changed(where, told):
        """The state with this in the entries of all codecs."""
        entries = {name: [*each] for name, each in codecs.items()}
        for each in entries.values():
            each[where] = told
        return state | {"codecs": entries}

    broken = {
        "format": {"nonsense": 1},
        "codec": changed(0, "other"),
        "renamed": changed(slice(0, 2), ["other", "topk(ratio=0.01)"]),
        "undelivered": state | {"undelivered": {"second.weight": torch.zeros(2)}},
        "rank": state | {"place": [7, 2]},
        "strategy": changed(2, "ring"),
        "missing": state | {"codecs": {}, "states": {}},
        "unexpected": state | {"codecs": codecs | {"ghost.weight": ["", "x", ""]}},
    }
    values = state["states"]["second.weight"]
    for title, damage in {
        "older": {"format": 5},
        "other": {"of": "outer"},
        "step": {"counter": 1.5},
        "negative": {"counter": -1},
        "codecs": {"codecs": None},
        "list": {"states": []},
        "plan": {"plan": {"second.weight": ["int8_fake", "ps", 0, 0]}},
        "values": {"states": state["states"] | {"second.weight": {"worker": {"residual": [1]}}}},
        "side": {"states": state["states"] | {"second.weight": {"owner": values["worker"]}}},
    }.items():
        found[title] = raised_by(hipress.load_state_dict, ddp, state | damage, strict=False)
    broken["absent"] = state | {"states": {"second.weight": values}}
    for side in ("worker", "aggregator"):
        half = {"second.weight": {key: value for key, value in values.items() if key != side}}
        broken[f"no {side}"] = state | {"states": state["states"] | half}
    shape = copy.deepcopy(state)
    shape["states"]["second.weight"]["worker"]["residual"] = torch.zeros(2)
    broken["shape"] = shape
    for title, bad in broken.items():
        found[title] = raised_by(hipress.load_state_dict, ddp, bad)
        if title != "format":
            logging.getLogger("hipress").setLevel(logging.ERROR)
            hipress.load_state_dict(ddp, bad, strict=False)
    return found


class Torn(NamedTuple):
    """Errors around a step in which rank 1's backward pass raises."""

    within: list[
        Raised
    ]  # of saving and of loading a state, when the first buckets are on their way
    step: Raised
    after: list[Raised]  # of saving and loading


def torn(rank, world_size):
    """Two steps, and one whose backward pass raises on rank 1."""
    ddp = hipress.wrap(make(), codec("int8"), timeout=SILENCE, ddp_kwargs=SMALL_BUCKETS)
    train(ddp, rank, range(2))
    saved, within = hipress.state_dict(ddp), []

    def states():
        return [
            raised_by(hipress.state_dict, ddp),
            raised_by(hipress.load_state_dict, ddp, saved),
        ]

    def amid(*_):
        within.extend(states())
        if rank == 1:
            raise ZeroDivisionError

    ddp.module.norm.register_full_backward_hook(amid)
    logging.disable(logging.CRITICAL)
    return Torn(within, raised_by(train, ddp, rank, range(2, 3)), states())


def forgotten(rank, world_size, scope):
    """Names of nonzero values after loading a state that fits no parameter, or only one."""
    ddp = hipress.wrap(make(), codec("int8"), scope=scope, ddp_kwargs=UNREBUILT)
    train(ddp, rank, range(2))
    saved = hipress.state_dict(ddp)
    train(ddp, rank, range(2))
    logging.disable(logging.CRITICAL)
    found = []
    values = {"second.weight": saved["states"]["second.weight"]}
    for unfit in ({"states": values}, {"place": [rank, 7]}):
        hipress.load_state_dict(ddp, saved | unfit, strict=False)
        found.append([name for name, any_ in left(ddp).items() if any_])
    return sorted(name for name, sides in saved["states"].items() if sides), found


PORTABLE = {
    "topk": {"compressor": "topk", "ratio": 0.1},
    "ring": {"compressor": "onebit_group", "strategy": "ring"},
    "onebit": {"compressor": "onebit_group", "strategy": "ps"},
    "dgc": {"compressor": "dgc", "ratio": 0.1, "momentum": 0.0},  # with it no sum stays the same
    "ef21": {"compressor": "ef21", "ratio": 0.1},
    "diana": {"compressor": "diana"},
    "powersgd": {"compressor": "powersgd"},
    "sparseloco": {"compressor": "sparseloco", "decay": 1.0},  # forgets nothing
    "none": {"compressor": "none"},
}


class Lines(nn.Module):
    """A parameter whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 40))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def trained_on(made, weight, rank, world_size, steps):
    """Sums of averages and of all ranks' mean gradients."""
    total, exact = torch.zeros(2, 64, 40)
    for step in steps:
        every = [torch.randn(64, 40, generator=torch.Generator().manual_seed(100 * step + r))
                 for r in range(world_size)]  # fmt: skip
        weight.grad = None
        if isinstance(made, hipress.Synchronizer):
            (weight * every[rank]).sum().backward()
            made.step()
        else:
            made(every[rank]).backward()
        total += weight.grad.full_tensor() if hasattr(weight, "placements") else weight.grad
        exact += sum(every) / world_size
    return total, exact


def left_of(made, world_size):
    """The mean over ranks of the undelivered gradients, those owed included."""
    engine = session_of(made).engine
    left = engine.buckets.undelivered((0,)) + sum(engine.undelivered.values())
    dist.all_reduce(left)
    return left.view(64, 40) / world_size


def saves_portable(rank, world_size, name, path):
    """The loss in four steps, and a portable state, saved by rank 0."""
    model = Lines()
    made = hipress.wrap(model, min_size=0, **PORTABLE[name])
    total, exact = trained_on(made, model.weight, rank, world_size, range(4))
    state = hipress.state_dict(made, portable=True)
    if rank == 0:
        torch.save(state, path)
    off = (total + left_of(made, world_size) - exact).abs().max().item()
    owed = state["undelivered"].get("weight", torch.zeros(64, 40))
    saved = owed - left_of(made, world_size)
    return off, saved.abs().max().item(), owed.norm().item()


def loads_portable(rank, world_size, name, path):
    """The loss as a portable state goes on with this codec and number of ranks."""
    model, state = Lines(), torch.load(path, weights_only=True)
    made = hipress.wrap(model, min_size=0, **PORTABLE[name])
    hipress.load_state_dict(made, state)
    total, exact = trained_on(made, model.weight, rank, world_size, range(4, 8))
    left = left_of(made, world_size)
    owed = state["undelivered"].get("weight", 0)
    return (total + left - exact - owed).abs().max().item(), digest(model)


def owed_to(made, world_size):
    """The mean over ranks of what has not been delivered of `Lines`, also where nothing is
    compressed."""
    session = session_of(made)
    if session.engine is not None:
        return left_of(made, world_size)
    held = session.loaded_gradients.undelivered if session.loaded_gradients else {}
    left = held.get(0, torch.zeros(64 * 40)).clone()
    dist.all_reduce(left)
    return left.view(64, 40) / world_size


WAYS = {"wrap": hipress.wrap, "sync": hipress.Synchronizer}
FEEDBACK = ("topk", "ring", "onebit", "powersgd", "none")


def app_of(way, name, **options):
    """A model of `Lines`, what synchronizes it, and the entries of a checkpoint."""
    model = Lines()
    made = WAYS[way](model, min_size=0, **PORTABLE.get(name, {"compressor": name}))
    state = hipress.Stateful(made, **options)
    return model, made, {"weights": model.state_dict(), "hipress": state}


def saves_everywhere(rank, world_size, path, ways=(*WAYS,), names=FEEDBACK):
    """Save by each way and codec. The undelivered gradient after three steps, by these."""
    found = {}
    for way in ways:
        for name in names:
            model, made, app = app_of(way, name)
            trained_on(made, model.weight, rank, world_size, range(3))
            dcp.save(app, checkpoint_id=f"{path}/{world_size}-{way}-{name}")
            state = hipress.state_dict(made, portable=True)
            if rank == 0:
                torch.save(state, f"{path}/{world_size}-{way}-{name}.pt")
            found[world_size, way, name] = owed_to(made, world_size)
            hipress.detach(made)
    return found


def loads_everywhere(rank, world_size, path, saved, names=FEEDBACK):
    """Load each checkpoint into another way and codec than saved it. By checkpoint: how far the
    undelivered gradient is off by either file, and the sum of averages after two steps more."""
    found = {}
    for number, ((ranks, way, name), owed) in enumerate(saved.items()):
        case = f"{path}/{ranks}-{way}-{name}"
        now = [*WAYS][number % 2], names[(number // 2 + ranks) % len(names)]
        model, made, app = app_of(*now)
        hipress.load_state_dict(made, torch.load(f"{case}.pt", weights_only=True))
        by_file = owed_to(made, world_size) - owed
        dcp.load(app, checkpoint_id=case)
        by_dcp = owed_to(made, world_size) - owed
        total, exact = trained_on(made, model.weight, rank, world_size, range(5, 7))
        after = total + owed_to(made, world_size) - exact - owed
        found[case] = [each.abs().max().item() for each in (by_file, by_dcp, after)]
        hipress.detach(made)
    return found


def exact_elsewhere(rank, world_size, path):
    """The norm of what `resume` brings to another number of ranks."""
    _, made, app = app_of("wrap", "topk", resume=path)
    dcp.load(app, checkpoint_id=path)
    return owed_to(made, world_size).norm().item()


def sharded(rank, world_size, shards, path, load):
    """The undelivered gradient by parameter, whole, of a model that FSDP2 shards."""
    from torch.distributed.fsdp import fully_shard

    shape = (world_size // shards, shards)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    made = hipress.Synchronizer(model, "topk", ratio=0.1, min_size=0, process_group=group)
    app = {"hipress": hipress.Stateful(made)}
    if load:
        dcp.load(app, checkpoint_id=path)
    else:
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 7, generator=generator)).square().mean().backward()
            made.step()
        dcp.save(app, checkpoint_id=path)
    held = app["hipress"].state_dict()["undelivered"]
    return {name: values.full_tensor() for name, values in held.items()}


def replicas(rank, world_size, shards, codec, path, load):
    """The undelivered gradient by file and by torch.distributed.checkpoint, and how far what
    arrives is off, of `Lines` on so many shards, whose replicas hipress.shard averages."""
    from torch.distributed.fsdp import fully_shard

    shape = (world_size // shards, shards)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Lines(), mesh=mesh["shard"])
    given = {} if codec is None else {
        "replicas": codec, "replica_group": mesh["replicate"].get_group(), "min_size": 0
    }  # fmt: skip
    hipress.shard(model, reduce_scatter=None, all_gather=None, **given)
    app, owed, found = {"hipress": hipress.Stateful(model)}, torch.zeros(64, 40), []
    if load:
        hipress.load_state_dict(model, torch.load(f"{path}.pt", weights_only=True))
        found.append(hipress.state_dict(model, portable=True)["undelivered"]["weight"])
        dcp.load(app, checkpoint_id=path)
        found.append(owed := hipress.state_dict(model, portable=True)["undelivered"]["weight"])
    steps = range(3, 6) if load else range(3)
    total, exact = trained_on(model, model.weight, rank, world_size, steps)
    state = hipress.state_dict(model, portable=True)
    left = state["undelivered"].get("weight", torch.zeros(64, 40))
    if not load:
        found = [left]
        dcp.save(app, checkpoint_id=path)
        if rank == 0:
            torch.save(state, f"{path}.pt")
    else:
        hipress.load_state_dict(model, hipress.state_dict(model))  # this rank's own
        again = hipress.state_dict(model, portable=True)["undelivered"].get("weight", left)
        assert again.equal(left)
    return found, (total + left - exact - owed).abs().max().item()


def killed_while_saving(rank, world_size, path):
    """Save a first checkpoint, and begin a second one, whose coordinator is killed when all data
    is written. Returns the error of the other rank."""
    model, made, app = app_of("wrap", "topk", exact=True)
    trained_on(made, model.weight, rank, world_size, range(3))
    dcp.save(app, checkpoint_id=f"{path}/1")
    writer = dcp.FileSystemWriter(f"{path}/2")
    writer.finish = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
    return raised_by(dcp.save, app, storage_writer=writer).kind


def measured_elsewhere(rank, world_size, state=None):
    """GraVAC's measurements before and after a load; under Accordion, and under none, these go on
    without. The portable state, by default of these ranks."""
    gravac = {"policy": hipress.GraVAC("topk", ratios=(0.5, 0.1), window=1, every=1)}
    if state is None:
        made = hipress.wrap(make(), **gravac)
        train(made, rank, range(4))
        state = hipress.state_dict(made, portable=True)
    again, found = hipress.wrap(make(), **gravac), [state["more"]["measured"]]
    hipress.load_state_dict(again, state)
    found.append(session_of(again).engine.chooser.measurements.state())
    accordion = hipress.Accordion("topk", low=0.5, high=0.1, window=9)
    for other in (hipress.wrap(make(), policy=accordion), hipress.wrap(make(), "topk")):
        hipress.load_state_dict(other, state)
        train(other, rank, range(1))
    return *found, state


class Deadly:
    """An object amid whose pickling the process is killed."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def killed_while_writing(rank, world_size, path):
    """Write a rank's file, and begin to write it again."""
    from hipress.integrations import files

    for values in (torch.ones(3), Deadly()):
        files.state_dict = lambda _, values=values: {"values": values}
        files.save(None, files.file_of(path))


def shares(rank, world_size, name, path, load):
    """Sums over the ranks of states that belong to shares of the mean gradient, and the mean of
    references that all ranks hold, after three steps that a checkpoint keeps, or as it is loaded.
    """
    model, made, app = app_of("sync", name)
    if load:
        dcp.load(app, checkpoint_id=path)
    else:
        trained_on(made, model.weight, rank, world_size, range(3))
        dcp.save(app, checkpoint_id=path)
    held = session_of(made).engine.buckets.residuals.arrays(0)["worker"]
    total = torch.tensor(held["v" if name == "dgc" else REFERENCE])
    dist.all_reduce(total)
    return total, torch.tensor(held.get(MEAN, total.numpy()))


def frozen(rank, world_size, path, load):
    """The undelivered part of an averaged momentum, the momentum, and a digest of weights two steps
    later."""
    model = Lines()
    optimizer = hipress.optim.AdamW(model.parameters(), lr=1e-3, freeze=2)
    if load:
        moments, weights = torch.load(f"{path}.pt", weights_only=True)
        optimizer.load_state_dict(moments)
        model.load_state_dict(weights)
    made = hipress.wrap(model, "topk", ratio=0.1, min_size=0, optimizer=optimizer)
    app = {"hipress": hipress.Stateful(made)}
    if load:
        dcp.load(app, checkpoint_id=path)
    else:
        _stepped(made, model, optimizer, rank, range(5))
        dcp.save(app, checkpoint_id=path)
        if rank == 0:
            torch.save([optimizer.state_dict(), model.state_dict()], f"{path}.pt")
    owed, momentum = owed_to(made, world_size), optimizer.state[model.weight]["exp_avg"].clone()
    _stepped(made, model, optimizer, rank, range(5, 7))
    return owed, momentum, digest(model)


def _stepped(made, model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        made(torch.randn(64, 40, generator=generator)).backward()
        optimizer.step()


def scaled(rank, world_size):
    """Gradients of one rank that brings what was undelivered, under a GradScaler whose first step
    overflows; and what is left of that before, after that step and after the next."""
    model = Lines()
    made = hipress.wrap(model, "topk", ratio=0.1)
    state = hipress.state_dict(made)
    hipress.load_state_dict(made, state | {"undelivered": {"weight": torch.ones(64, 40)}})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, left = torch.optim.SGD(model.parameters(), lr=0.0), [owed_to(made, 1).sum().item()]
    for value in (float("inf"), 2.0, 3.0):
        optimizer.zero_grad()
        scaler.scale(made(torch.full((64, 40), value))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        left.append(owed_to(made, 1).sum().item())
        left.append(model.weight.grad.mean().item())
    return left, hipress.state_dict(made)["undelivered"]


def sharded_by_hipress(rank, world_size, path, load):
    """The number of backward passes that a model of hipress.shard has made, or has loaded."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 64), mesh=dist.init_device_mesh("cpu", (world_size,)))
    hipress.shard(model, reduce_scatter="int4_group")
    app = {"hipress": hipress.Stateful(model)}
    if load:
        dcp.load(app, checkpoint_id=path)
    else:
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
        dcp.save(app, checkpoint_id=path)
    return hipress.state_dict(model)["counter"]


def nothing_owed(rank, world_size):
    """Elements that travel for portable states of codecs that hold nothing back, by way."""
    moved, sum_over, whole = [], groups.sum_over, handles.whole
    groups.sum_over = lambda values, group: (moved.append(len(values)), sum_over(values, group))[1]
    handles.whole = lambda shard, like: (moved.append(shard.numel()), whole(shard, like))[1]
    wrapped = hipress.wrap(make(), "int4_group")
    train(wrapped, rank, range(2))
    sharded = hipress.shard(fully_shard(make()), min_size=0)
    train(sharded, rank, range(2))
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = hipress.Outer(model, optimizer, "int4_group", every=1, fragments=1)
    with torch.no_grad():
        model.scale.add_(1.0)
    outer.step()
    found = {}
    for name, each in (("wrap", wrapped), ("shard", sharded), ("Outer", outer)):
        moved.clear()
        state = hipress.state_dict(each, portable=True)
        assert state["undelivered"] == {}
        hipress.load_state_dict(each, state)
        found[name] = sum(moved)
    return found
