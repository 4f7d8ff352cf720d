"""Ranks of test_policies.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

import hipress
from hipress.session import session_of
from tests.hipress.common import digest, error_of


class Given(torch.autograd.Function):
    """A parameter with a given gradient."""

    @staticmethod
    def forward(ctx, parameter, gradient):
        ctx.gradient = gradient
        return parameter.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.gradient, None


class Two(torch.nn.Module):
    """Two parameters of 4096 elements, whose gradients are given."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(64, 64))
        self.other = torch.nn.Parameter(torch.zeros(64, 64))

    def forward(self, gradients):
        pairs = zip((self.one, self.other), gradients, strict=True)
        return sum(Given.apply(parameter, gradient) for parameter, gradient in pairs)


def spiked(rank, step, share):
    """Gradients with nearly all of their square in a bit less than a `share` of the elements. These
    differ by step and are the same on all ranks, since owners compress the average once more."""
    generator = torch.Generator().manual_seed(step)
    values = 1e-3 * torch.randn(4096, generator=generator)
    most = torch.randperm(4096, generator=generator)[: round(0.9 * share * 4096)]
    values[most] = 1.0
    return values.view(64, 64)


def even(rank, step):
    """Noise: the largest hundredth of the elements has a small part of the square."""
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(100 * step + rank))


KINDS = {
    "one in a thousand": lambda rank, step: spiked(rank, step, 0.001),
    "one in a hundred": lambda rank, step: spiked(rank, step, 0.01),
    "even": even,
}


def chosen(rank, world_size, kind, steps, policy, way="wrap"):
    """Codecs of the first parameter by step, the report, and a digest."""
    torch.manual_seed(0)
    model = Two()
    make = hipress.wrap if way == "wrap" else hipress.Synchronizer
    made = make(model, policy=policy, verify=True)
    found = []
    for step in range(steps):
        gradient = KINDS[kind](rank, step)
        loss = (made if way == "wrap" else model)([gradient, gradient])
        loss.backward()
        if way != "wrap":
            made.step()
        decisions = hipress.report(made).decisions
        found.append([each.codec for each in decisions])
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    report = hipress.report(made)
    return found, report.to_dict()["options"]["policy"], digest(model), str(report)


def still(rank, world_size, policy, slower):
    """Codecs of two parameters by step: the gradients of one stay constant, those of the other
    halve in each window of five. slower: the step at which the learning rate falls."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    object.__setattr__(policy, "optimizer", optimizer)
    made = hipress.wrap(model, policy=policy)
    found = []
    for step in range(25):
        if step == slower:
            optimizer.param_groups[0]["lr"] = 0.1
        same = spiked(rank, 0, 0.01)  # all that matters is sent in every step
        made([same, same * 0.25 ** (step // 5)]).backward()
        found.append([each.codec for each in hipress.report(made).decisions])
        optimizer.zero_grad()
    return found


def handed_on(rank, world_size, compressor, strategy):
    """The sum of all averages and of the remaining residuals, against that of all gradients."""
    model = Two()
    policy = hipress.Warmup(compressor, ratios=(0.3, 0.1, 0.01), steps=2)
    made = hipress.wrap(model, policy=policy, strategy=strategy)
    total, exact = torch.zeros(4096), torch.zeros(4096)
    labels = []
    for step in range(7):
        made([even(rank, step), even(rank, step)]).backward()
        total += model.one.grad.flatten()
        exact += sum(even(r, step) for r in range(world_size)).flatten() / world_size
        made.zero_grad()
        labels.append(hipress.report(made).decisions[0].codec)
    state = hipress.state_dict(made)["states"]["one"]
    share = {"worker": 1.0 if strategy == "exchange" else 1.0 / world_size, "aggregator": 1.0}
    left = sum(share[side] * values["residual"].flatten() for side, values in state.items())
    dist.all_reduce(left)
    return (total + left - exact).abs().max().item(), labels


POLICIES = {
    "gravac": hipress.GraVAC("topk", (0.3, 0.1, 0.01), window=2, every=1, least=0.05, flat=0.99),
    "accordion": hipress.Accordion("topk", low=0.3, high=0.01, window=2),
    "warmup": hipress.Warmup("topk", (0.3, 0.1, 0.01), steps=2),
}


def nothing_lost(rank, world_size, policy, strategy, scope):
    """Trainings of nine steps that are resumed after each number of steps: the difference of their
    averages and undelivered gradients from all gradients; levels before and after; and the norm of
    states that were saved and loaded."""
    found = []
    for moment in range(1, 9):
        model, total, exact, labels = Two(), torch.zeros(4096), torch.zeros(4096), []
        made = hipress.wrap(model, policy=POLICIES[policy], strategy=strategy, scope=scope)
        for step in range(9):
            if step == moment:
                saved = hipress.state_dict(made)
                made = hipress.wrap(Two(), policy=POLICIES[policy], strategy=strategy, scope=scope)
                hipress.load_state_dict(made, saved)
                kept = [norms(saved), norms(hipress.state_dict(made))]
            gradient = spiked(rank, step, 0.05) + even(rank, step)
            made([gradient, gradient]).backward()
            total += made.module.one.grad.flatten()
            every = (spiked(r, step, 0.05) + even(r, step) for r in range(world_size))
            exact += sum(every).flatten() / world_size
            made.zero_grad()
            labels.append(hipress.report(made).decisions[0].codec)
        residuals = session_of(made).engine.buckets.residuals
        left = residuals.undelivered(0)
        left = torch.zeros(4096) if left is None else left / world_size
        dist.all_reduce(left)
        found.append(((total + left - exact).abs().max().item(), labels, kept))
    return found


def norms(state):
    """The norm of each array of a state, and of owed gradients."""
    arrays = [
        values
        for sides in state["states"].values()
        for side in sides.values()
        for values in side.values()
    ]
    return [values.norm().item() for values in (*arrays, *state["undelivered"].values())]


def refused(rank, world_size, policy, options):
    """Errors of ranks, also if only rank 1 makes a mistake."""
    first = error_of(hipress.wrap, Two(), policy=policy, **options)
    usual = hipress.Warmup("topk", ratios=(0.1, 0.01))
    both = error_of(hipress.wrap, Two(), policy=policy if rank == 1 else usual, timeout=30)
    return first[:2], both[:2]
