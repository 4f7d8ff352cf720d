"""Ranks of test_gossip.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import hipress
from casync.estimates import OWN, copy_of
from casync.strategies.gossip import grid
from hipress.engine import order
from tests.hipress.common import data, digest, make, raised_by, refuses


def apart(model, rank):
    """Parameters that differ between ranks."""
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)


def mean(model):
    """The average parameters, as one vector, in float64."""
    flat = torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])
    dist.all_reduce(flat)
    return flat / dist.get_world_size()


def copies_fit(gossip, links):
    """True if this rank's copies have the bits of its neighbours' estimates."""
    state = hipress.state_dict(gossip)["states"]
    own = torch.cat([sides["worker"][OWN].reshape(-1) for sides in state.values()])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return all(
        torch.equal(
            every[other].view(torch.int32),
            torch.cat([s["worker"][copy_of(other)].reshape(-1) for s in state.values()]).view(
                torch.int32
            ),
        )
        for other in grid(links, dist.get_world_size()).neighbours(dist.get_rank())
    )


def converging(rank, world_size, cases):
    """Relative consensus distances by case, distances of the average, and checks of the copies."""
    order.LARGE_BYTES = 64  # some parameters in place, others gathered
    found = {}
    for title, (links, name, params, steps, every) in cases.items():
        model = make()
        gossip = hipress.Gossip(model, name, topology=links, **params)
        apart(model, rank)
        before, far = mean(model), []
        for step in range(steps + 1):
            if step % every == 0:
                far.append(hipress.consensus_distance(model, relative=True))
            gossip.step()
        moved = ((mean(model) - before).norm() / before.norm()).item()
        found[title] = far, moved, copies_fit(gossip, links)
        hipress.detach(gossip)
    return found


def fit(model, gossip, rank, steps):
    """Losses of local steps, each followed by gossip."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in steps:
        x, y = data(rank, step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gossip.step()
        losses.append(loss.item())
    return losses


def trained(rank, world_size, name, params):
    """Losses with gossip and alone, distances, the report, and errors for unfit states."""
    model, alone = make(), make()
    gossip = hipress.Gossip(model, name, **params)
    losses = fit(model, gossip, rank, range(6))
    saved = hipress.state_dict(gossip)
    losses += fit(model, gossip, rank, range(6, 10))
    fit(alone, gossip_of_none, rank, range(10))
    distances = hipress.consensus_distance(model), hipress.consensus_distance(alone)
    report = hipress.report(gossip)
    early = hipress.state_dict(gossip) | {"counter": 6}
    mixed = raised_by(hipress.load_state_dict, gossip, early if rank == 1 else saved)
    broken = raised_by(gossip.step)
    other = hipress.Gossip(make(), name, **params, topology="complete")
    elsewhere = raised_by(hipress.load_state_dict, other, saved)
    texts = str(report), report.why, report.bytes_per_step
    return losses, distances, texts, mixed, broken, elsewhere


class gossip_of_none:
    """A stand-in for gossip that does nothing."""

    @staticmethod
    def step():
        pass


def refusals(rank, world_size):
    """Impossible Gossips, after which one trains."""
    last = {"gamma": 0.1 * (1 + (rank == 2))}
    for text, name, options in (
        ("takes no verify: ranks hold different parameters by design", "topk", {"verify": True}),
        ("takes no strategy: it averages parameters", "topk", {"strategy": "ps"}),
        ("did you mean 'ratio'?", "topk", {"rato": 0.1}),
        ("Gossip needs a compressor by name", "auto", {}),
        ("every is a whole number from 1 on, not 0", "topk", {"every": 0}),
        (
            "the outer momentum of Gossip is Nesterov's",
            "topk",
            {"outer": hipress.OuterSGD(0.7, 0.9, nesterov=False)},
        ),
        ("gamma must be None or a number in (0, 1], got 0", "topk", {"gamma": 0}),
        ("did you mean 'torus'?", "topk", {"topology": "tours"}),
        ("topology='torus': 3 ranks make no torus", "topk", {"topology": "torus"}),
        ("it keeps a state of gradients (u, v)", "dgc", {}),
        ("only together with those of all ranks", "powersgd", {}),
        ("only together with those of all ranks", "signsgd", {}),
        ("would not improve", "tern_group", {}),
        ("would not improve", "threshold", {}),
        (
            "ranks disagree on topology of gossip: rank 0: ring, rank 1: complete",
            "topk",
            {"topology": ("ring", "complete", "ring")[rank]},
        ),
        ("ranks disagree on compressor", ("topk", "int4_group", "topk")[rank], {}),
        ("ranks disagree on gamma: rank 0: 0.1, rank 2: 0.2", "topk", last),
        ("must be None or a number in (0, 1], got 2", "topk", {"gamma": (0.5, 2, 0.5)[rank]}),
    ):
        refuses(text, hipress.Gossip, make(), name, **options)
    model = make()
    sync, ddp = hipress.Synchronizer(model, "none"), nn.parallel.DistributedDataParallel(make())
    for text, each in (
        ("'scale' is of float64", make().double()),
        ("'scale' is on meta; gossip is for CPUs", make().to("meta")),
        ("a Gossip takes a module without DDP", ddp),
        ("synchronizes 'scale' of the model already", model),
    ):
        refuses(text, hipress.Gossip, each, "topk")
    hipress.detach(sync)
    other = make() if rank else nn.Linear(2, 2)
    refuses("has others than rank", hipress.consensus_distance, other)
    refuses("see hipress.Gossip", hipress.wrap, make(), "topk", strategy="gossip")
    gossip = hipress.Gossip(model, "topk", min_size=0)
    fit(model, gossip, rank, range(2))
    hipress.detach(gossip)
    refuses("detached from this Gossip", gossip.step)


def odd(rank, world_size):
    """Frozen, bfloat16, transposed, tied, empty parameters and one whose gradient is sparse;
    rules, chunks and a checksum."""
    model = nn.Module()
    model.table = nn.Parameter(torch.randn(300, 70) + rank)
    model.turned = nn.Parameter(torch.randn(70, 40).t())
    model.short = nn.Parameter(torch.randn(5000).bfloat16())
    model.tied, model.none = model.table, nn.Parameter(torch.zeros(0))
    model.words = nn.Embedding(100, 20, sparse=True)
    model.frozen = nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
    rules = {"short": "fp16", "turned": None}
    gossip = hipress.Gossip(
        model, "int4_group", topology="complete", gamma=0.8, rules=rules, checksum=True
    )
    started = hipress.consensus_distance(model)
    with torch.no_grad():
        for parameter in (model.table, model.turned, model.short):
            parameter += rank
    before = mean(model)
    far = [hipress.consensus_distance(model)]
    for _ in range(12):
        gossip.step()
    far.append(hipress.consensus_distance(model))
    moved = ((mean(model) - before).norm() / before.norm()).item()
    kept = model.frozen.tolist(), model.turned.stride()
    codecs = {d.name: d.codec for d in hipress.report(gossip).decisions}
    return started, far, moved, kept, codecs


def alone(rank, world_size):
    """Gossip of a single rank changes nothing."""
    model = make()
    gossip = hipress.Gossip(model, "topk", topology="torus")
    before = digest(model)
    gossip.step()
    state = hipress.state_dict(gossip)
    hipress.load_state_dict(gossip, state)
    return digest(model) == before, hipress.consensus_distance(model), state["states"]


def rounds(rank, world_size):
    """Largest difference from Outer, of Gossip among all with exact payloads; and of models apart,
    on a ring with local steps: distances by round, and the distance of their mean from its goal."""
    outer = hipress.OuterSGD(0.7, 0.9)
    found = []
    for make_loop in (
        lambda model, _: hipress.Gossip(
            model, "none", topology="complete", gamma=1.0, every=3, outer=outer
        ),
        lambda model, optimizer: hipress.Outer(model, optimizer, "none", every=3, outer=outer),
    ):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loop = make_loop(model, optimizer)
        for step in range(12):
            x, y = data(rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            loop.step()
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        hipress.detach(loop)
    model = make()
    loop = hipress.Gossip(model, "int4_group", every=2, outer=hipress.OuterSGD(1.0, 0.5))
    begin = mean(model)
    apart(model, rank)
    changed, far = mean(model), []
    for step in range(40):
        if step % 10 == 0:
            far.append(hipress.consensus_distance(model, relative=True))
        was = digest(model)
        loop.step()
        assert (digest(model) == was) == (step % 2 == 0)
    goal = changed + (changed - begin)  # by momentum: 0.5 + 0.25 + ... of the change
    moved = ((mean(model) - goal).norm() / goal.norm()).item()
    return (found[0] - found[1]).abs().max().item(), far, moved, str(hipress.report(loop))
