"""Ranks of test_outer.py."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hipress
from hipress import OuterSGD, integrations
from hipress.outer.members import FixedMembers
from tests import gpus
from tests.hipress.common import data, digest, make, raised_by, refuses

AVERAGE = OuterSGD(1.0, 0.0, nesterov=False)


def train(outer, model, optimizer, rank, steps):
    for step in steps:
        x, y = data(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        outer.step()


def started(compressor="int4_group", lr=0.02, momentum=0.9, **options):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, optimizer, hipress.Outer(model, optimizer, compressor, **options)


def agreed(outer):
    return [fragment.agreed.clone() for fragment in outer.site.fragments]


def every_step(rank, world_size):
    """Largest difference from a training by averaged gradients, where each step is a round."""
    model, optimizer, outer = started("none", momentum=0.0, every=1, outer=AVERAGE)
    train(outer, model, optimizer, rank, range(5))
    other = make()
    plain = torch.optim.SGD(other.parameters(), lr=0.02)
    for step in range(5):
        plain.zero_grad()
        for each in range(world_size):
            x, y = data(each, step)
            (nn.functional.mse_loss(other(x), y) / world_size).backward()
        plain.step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def trained(rank, world_size, compressor, options):
    """Digests of weights and of agreed weights after rounds, and the distance that they went."""
    torch.manual_seed(rank)
    model, optimizer, outer = started(compressor, every=4, **options)
    begin = torch.cat(agreed(outer))
    found = []
    for four in range(3):
        train(outer, model, optimizer, rank, range(4 * four, 4 * four + 4))
        found.append([each.tolist() for each in agreed(outer)])
    apart = float((torch.cat(agreed(outer)) - begin).norm())
    return found, digest(model), outer.rounds, apart


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def streamed(rank, world_size, mix):
    """Weights of a site around the end of a round that was delayed, and those of the rule."""
    model, optimizer, outer = started("none", every=4, delay=2, mix=mix, outer=AVERAGE)
    train(outer, model, optimizer, rank, range(4))
    sent, old = flat(model), agreed(outer)[0]
    train(outer, model, optimizer, rank, range(4, 5))
    assert torch.equal(agreed(outer)[0], old)  # on its way
    x, y = data(rank, 5)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    before = flat(model)
    outer.step()
    new = in_order(outer.site.fragments[0], agreed(outer)[0], model)
    rule = new + before - sent if mix is None else torch.lerp(before, new, mix)
    return float((flat(model) - rule).abs().max()), float((new - sent).abs().max())


def in_order(fragment, values, model):
    """Flat values of a fragment of the whole model, in the model's order."""
    pieces = fragment.split(values)
    return torch.cat([pieces[name].reshape(-1) for name, _ in model.named_parameters()])


def saved(rank, world_size, compressor, options):
    """The portable state after six steps, which changes nothing."""
    model, step, outer = started(compressor, momentum=0.0, every=4, **options)
    train(outer, model, step, rank, range(6))
    hipress.state_dict(outer, portable=True)
    return hipress.state_dict(outer, portable=True)


def rolled_back(rank, world_size, compressor, options):
    """Two sites of a portable state, one that has trained on and one that is new: for each what it
    owes then, and agreed weights three rounds later."""

    def goes_on(model, optimizer, outer):
        hipress.load_state_dict(outer, state)
        owed = torch.cat([outer.site.left(fragment) for fragment in outer.site.fragments])
        train(outer, model, optimizer, rank, range(9, 15))
        return owed.tolist(), torch.cat(agreed(outer)).tolist()

    model, optimizer, outer = started(compressor, momentum=0.0, every=2, **options)
    train(outer, model, optimizer, rank, range(5))
    state = hipress.state_dict(outer, portable=True)
    train(outer, model, optimizer, rank, range(5, 9))
    back = goes_on(model, optimizer, outer)
    hipress.detach(outer)
    return back, goes_on(*started(compressor, momentum=0.0, every=2, **options))


def moved_by_dcp(rank, world_size, path, load):
    """The portable state of these sites, as it was saved or loaded, and a digest of weights after
    two rounds more."""
    model, step, outer = started("onebit_group", every=4)
    checkpoint = {"hipress": hipress.Stateful(outer)}
    if load:
        dcp.load(checkpoint, checkpoint_id=path)
    else:
        train(outer, model, step, rank, range(6))
        dcp.save(checkpoint, checkpoint_id=path)
    state = hipress.state_dict(outer, portable=True)
    train(outer, model, step, rank, range(6, 14))
    return state, digest(model)


def moved(rank, world_size, state):
    """A portable state at these sites: the error of the mean of their debts, and its size."""
    model, _, outer = started("onebit_group", every=4)
    hipress.load_state_dict(outer, state)
    fragment = outer.site.fragments[0]
    assert torch.equal(flat(model), in_order(fragment, fragment.agreed, model))
    owed = fragment.undelivered.clone()
    dist.all_reduce(owed)
    nothing = {each.name: torch.zeros(each.shape) for each in fragment.params}
    saved = fragment.join({**nothing, **state["undelivered"]})
    return float((owed / world_size - saved).abs().max()), float(saved.abs().max()), outer.rounds


class Refusing:
    """All sites, as FixedMembers, but the second round is not committed."""

    changes = True
    patience = 60.0

    def __init__(self, group, timeout):
        self.inner, self.number = FixedMembers(group, timeout), 0

    def meet(self, *, leaving):
        self.number += 1
        return self.inner.meet(leaving=leaving)

    def commit(self, error):
        if error is not None:
            raise error
        return self.number != 3

    def fail(self, error):
        pass

    def close(self):
        pass


def states_of(outer):
    """States of codecs, by parameter, side and name."""
    return outer.site.connected().states.export()


def same(left, right):
    return digest_of(left) == digest_of(right)


def digest_of(states):
    return {
        (name, side, state): values.tolist()
        for name, sides in states.items()
        for side, arrays in sides.items()
        for state, values in arrays.items()
    }


def refused(rank, world_size, compressor):
    """True if weights, agreed weights and states are the same before and after a round that is not
    committed; and if the round did change states."""
    members = Refusing(dist.group.WORLD, 60.0)
    model, optimizer, outer = started(compressor, every=2, members=members)
    train(outer, model, optimizer, rank, range(3))
    x, y = data(rank, 3)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    before = digest(model), agreed(outer), states_of(outer)
    changed = []
    put_back = outer.site.connected().put_back
    outer.site.connected().put_back = lambda states: (
        changed.append(not same(states_of(outer), before[2])), put_back(states)
    )  # fmt: skip
    outer.step()
    kept = digest(model) == before[0] and all(map(torch.equal, agreed(outer), before[1]))
    kept &= same(states_of(outer), before[2])
    undone = outer.site.undone, outer.rounds
    train(outer, model, optimizer, rank, range(4, 6))
    return kept, changed, undone, outer.rounds


def errors(rank, world_size):
    """Options and models that cannot be used."""
    model = make()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.02) for each in (model, make()))
    for text, options in (
        (
            "every=10 steps do not divide into fragments=3 rounds: 9 do",
            {"every": 10, "fragments": 3},
        ),
        ("fragments=99 rounds do not fit into every=5 steps", {"every": 5, "fragments": 99}),
        (
            "delay=4: a round must end before the next begins, so at most 3",
            {"every": 4, "delay": 4},
        ),
        ("delay=2: a round must end before", {"every": 4, "fragments": 2, "delay": 2}),
        ("Outer needs a compressor by name", {"compressor": "auto"}),
        ("mix is a share in (0, 1] or None, not 0.0", {"mix": 0.0}),
        ("ranks disagree on schedule: rank 0: every 10 steps", {"every": 10 + rank}),
        (
            "ranks disagree on compressor: rank 0: int8_group",
            {"compressor": "int4_group" if rank else "int8_group"},
        ),
        ("hipress.Outer takes no verify: it averages weights between sites", {"verify": True}),
        ("neither hipress.Outer nor compressor 'int4_group' takes 'verfy'", {"verfy": True}),
        (
            "neither hipress.Outer nor compressor 'topk' takes 'evrey': did you mean 'every'?",
            {"compressor": "topk", "ratio": 0.1, "evrey": 4},
        ),
        (
            "members is a hipress.StoreMembers or a hipress.TorchftMembers, not",
            {"members": dist.distributed_c10d._get_default_store()},
        ),
    ):
        refuses(text, hipress.Outer, model, optimizer, **options)
    refuses("ranks disagree on parameters", of_linear, in_features=3 + rank)
    refuses("parameter 'weight' is on the meta device", of_linear, in_features=3, device="meta")
    refuses("steps this model's parameters between rounds, not SGD", hipress.Outer, model, other)
    unknown = "unknown preset of Outer 'diloko'. did you mean 'diloco'?"
    refuses(unknown, hipress.Outer.preset, "diloko", model, optimizer)
    refuses(
        "the model comes first: hipress.Outer(model, optimizer)", hipress.Outer, optimizer, model
    )
    for each in (hipress.wrap(model, "int4_group"), model):
        told = "a DistributedDataParallel averages this model's gradients with rank"
        refuses(told, hipress.Outer, each, optimizer)


def wrapped_later(rank, world_size):
    """The error of a round whose model has got a plain DDP around it."""
    model, optimizer, outer = started(every=2)
    ddp = nn.parallel.DistributedDataParallel(model)
    return raised_by(train, outer, ddp, optimizer, rank, range(2))


def of_linear(**made):
    """The outer loop of a layer."""
    model = nn.Linear(out_features=2, **made)
    hipress.Outer(model, torch.optim.SGD(model.parameters(), lr=0.1))


def wrong_states(rank, world_size):
    """Errors of states that do not fit the rounds of an outer loop, or are none."""
    model, optimizer, outer = started(every=4, delay=2)
    train(outer, model, optimizer, rank, range(7))
    state = hipress.state_dict(outer)
    found = []
    for options in ({"every": 2}, {"every": 4, "delay": 1}, {"every": 4, "delay": 2, "mix": 0.5}):
        _, _, other = started(**options)
        found.append(raised_by(hipress.load_state_dict, other, state))
    unknown = [None, {}, model.state_dict()]
    return found, [raised_by(hipress.load_state_dict, outer, each) for each in unknown]


def diverges(rank, world_size):
    """The error of a site with a weight that is not finite, and of the other; agreed weights."""
    model, optimizer, outer = started(every=2)
    train(outer, model, optimizer, rank, range(2))
    if rank == 1:
        with torch.no_grad():
            model.second.weight[3, 5] = float("inf")
    return raised_by(train, outer, model, optimizer, rank, range(2, 4)), agreed(outer)


def amid_by_dcp(rank, world_size, path, load):
    """The error of a checkpoint that was saved amid a round, at other sites."""
    model, step, outer = started("onebit_group", every=4, delay=3)
    if load:
        resumed = hipress.Stateful(outer, resume=path)
        return raised_by(dcp.load, {"hipress": resumed}, checkpoint_id=path)
    train(outer, model, step, rank, range(6))
    dcp.save({"hipress": hipress.Stateful(outer, exact=True)}, checkpoint_id=path)
    return None


def distance_of_no_module(rank, world_size):
    """The error of a distance that is asked of an Outer."""
    return raised_by(hipress.consensus_distance, started()[-1])


def undone(rank, world_size, names):
    """`refused` by name of a compressor; None for those that Outer refuses."""
    return {name: refused(rank, world_size, name) for name in names}


def memory(rank, world_size, compressor, options):
    """Bytes by use, between two rounds and during one."""
    model, optimizer, outer = started(compressor, every=4, delay=2, **options)
    train(outer, model, optimizer, rank, range(5))
    during = hipress.report(outer).memory
    train(outer, model, optimizer, rank, range(5, 6))
    report, figures = hipress.report(outer), integrations.scalars(outer)
    assert figures["hipress/bytes"] == report.sent_bytes / report.rounds > 0
    assert (figures["hipress/sites"], figures["hipress/rounds"]) == (world_size, 1)
    return during, report.memory, str(report)


def scaled(rank, world_size):
    """A GradScaler skips a step at one site; the other goes on. Digests and rounds, by a hook."""
    model, optimizer, outer = started("int4_group", every=3)
    optimizer.register_step_post_hook(outer.step)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    compiled = torch.compile(model, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    while outer.rounds < 2:
        x, y = data(rank, outer.rounds)
        scaler.scale(nn.functional.mse_loss(compiled(x / 2), y)).backward()  # to be accumulated
        loss = nn.functional.mse_loss(compiled(x), y)
        bad = rank == 1 and outer.rounds == 1 and outer.site.steps == 1 and scaler.get_scale() > 600
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    return digest(model), scaler.get_scale()


def sharded(rank, world_size):
    """Two sites of two ranks, by FSDP2 within a site: shards of like ranks, and their rounds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    model = fully_shard(make(), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outer = hipress.Outer(
        model, optimizer, "int4_group", every=2, process_group=mesh["site"].get_group()
    )
    begin = [p.to_local().clone() for p in model.parameters()]
    train(outer, model, optimizer, rank, range(4))
    now = [p.to_local().clone() for p in model.parameters()]
    apart = max(float((a - b).abs().max()) for a, b in zip(begin, now, strict=True) if a.numel())
    return [each.tolist() for each in now], outer.rounds, apart


def within_sites(rank, world_size):
    """Two sites of two ranks, by wrap within a site."""
    sites = dist.new_group([0, 1]), dist.new_group([2, 3])
    like = dist.new_group([0, 2]), dist.new_group([1, 3])
    model = hipress.wrap(make(), "int4_group", process_group=sites[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outer = hipress.Outer(model, optimizer, "onebit_group", every=2, process_group=like[rank % 2])
    found = []
    for step in range(5):
        train(outer, model, optimizer, rank, range(step, step + 1))
        found.append(digest(model))
    return found


def by_strategy(rank, world_size, compressor, strategy):
    """Agreed weights after a round by this strategy, and the peers that are watched."""
    model, optimizer, outer = started(compressor, every=2, strategy=strategy, min_size=0)
    train(outer, model, optimizer, rank, range(2))
    names = [each.name for each in threading.enumerate()]
    peers = sorted({int(name.rpartition("-")[2]) for name in names if "watch-" in name})
    return [each.tolist() for each in agreed(outer)], peers


def on_a_gpu(rank, world_size):
    """Agreed weights after two rounds of a model on a GPU; True if they are in pinned memory, and
    if the model has them."""
    device = gpus.take(rank)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outer = hipress.Outer(model, optimizer, every=2, delay=1)
    for step in range(5):
        x, y = (each.to(device) for each in data(rank, step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        outer.step()
    (fragment,) = outer.site.fragments
    far = (flat(model).cpu() - in_order(fragment, fragment.agreed, model)).abs().max()
    return fragment.agreed.tolist(), fragment.agreed.is_pinned(), float(far)
