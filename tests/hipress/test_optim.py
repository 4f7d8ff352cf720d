"""Optimizers of hipress.optim in one process, without averages."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import compll
from hipress import optim
from hipress.errors import ConfigError, StateError

OPTIONS = [
    {},
    {"foreach": True},
    {"foreach": False, "maximize": True},
    {"fused": True},
    {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-5},
]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3, bias=False))


def fit(model, optimizer, steps, schedule=None):
    for step in steps:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_until_the_freeze_they_are_those_of_torch_bit_by_bit(name, options):
    models = []
    for module in (optim, torch.optim):
        model = make()
        fit(model, getattr(module, name)(model.parameters(), lr=0.01, **options), range(6))
        models.append(values(model))
    assert torch.equal(*models)


def test_max_norm_clips_as_torch_does():
    one, other = make(), make()
    fit(one, optim.AdamW(one.parameters(), max_norm=0.1), range(5))
    optimizer = torch.optim.AdamW(other.parameters())

    def clip(*_):
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    fit(other, optimizer, range(5))
    assert torch.equal(values(one), values(other))


@pytest.mark.parametrize("first", [0, 1])
def test_states_load_from_torch_and_into_it(first):
    """Four steps by one optimizer, then four by the other."""
    kinds = (optim.AdamW, torch.optim.AdamW)
    straight, model = make(), make()
    fit(straight, torch.optim.AdamW(straight.parameters()), range(8))
    before = kinds[first](model.parameters())
    fit(model, before, range(4))
    after = kinds[1 - first](model.parameters())
    after.load_state_dict(before.state_dict())
    fit(model, after, range(4, 8))
    assert torch.equal(values(model), values(straight))


def test_a_frozen_state_goes_on_and_back_to_torch():
    straight, model = make(), make()
    fit(straight, optim.AdamW(straight.parameters(), freeze=4), range(8))
    before = optim.AdamW(model.parameters(), freeze=4)
    fit(model, before, range(6))
    after = optim.AdamW(model.parameters(), freeze=4)
    after.load_state_dict(before.state_dict())
    assert after.averaging
    fit(model, after, range(6, 8))
    assert torch.equal(values(model), values(straight))
    back = torch.optim.AdamW(model.parameters())
    back.load_state_dict(after.state_dict())
    fit(model, back, range(8, 9))
    with pytest.raises(StateError, match="make the optimizer with freeze="):
        optim.AdamW(model.parameters(), freeze=None).load_state_dict(after.state_dict())


@pytest.mark.parametrize(
    "kind", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}]
)
@pytest.mark.parametrize("saved", [2, 5])
def test_torchs_states_keep_the_freeze(kind, saved):
    """Saved before or after it, and loaded into a new optimizer, an unfrozen and a frozen one."""
    options = StateDictOptions(**kind)
    straight = make()
    fit(straight, optim.AdamW(straight.parameters(), freeze=4), range(8))
    for before in 0, 2, 5:
        model, other = make(), make()
        first, second = (optim.AdamW(m.parameters(), freeze=4) for m in (model, other))
        fit(model, first, range(saved))
        fit(other, second, range(before))
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(
            other, second, get_optimizer_state_dict(model, first, options=options), options=options
        )
        assert second.phase.momentum == (saved == 5)
        fit(other, second, range(saved, 8))
        assert torch.equal(values(other), values(straight))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_after_the_freeze_v_and_its_correction_stay(decoupled, maximize):
    """The formula, element by element; the learning rate rises after the freeze."""
    b1, b2, eps, decay = 0.8, 0.9, 1e-6, 0.1
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    kind = optim.AdamW if decoupled else optim.Adam
    optimizer = kind(
        [parameter], betas=(b1, b2), eps=eps, weight_decay=decay, freeze=3, maximize=maximize
    )
    p, m, v = parameter.detach().double().numpy().copy(), np.zeros(3), np.zeros(3)
    for step in range(1, 8):
        rate = 0.1 if step <= 4 else 0.02 * step
        optimizer.param_groups[0]["lr"] = rate
        g = np.array([0.5, -0.25, 1.0]) * (1 + 0.3 * math.sin(step))
        parameter.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
        g = -g if maximize else g
        g, shrunk = (g, 1 - rate * decay) if decoupled else (g + decay * p, 1.0)
        m = b1 * m + (1 - b1) * g
        if step <= 3:
            v = b2 * v + (1 - b2) * g * g
        corrected = np.sqrt(v / (1 - b2 ** min(step, 3))) + eps
        p = p * shrunk - rate * m / (1 - b1**step) / corrected
        assert parameter.detach().numpy() == pytest.approx(p, rel=1e-4)


@pytest.mark.parametrize(("floor", "bound"), [(0.01, 0.2), (0.0, math.inf)])
def test_rows_never_seen_before_the_freeze(monkeypatch, floor, bound):
    """A row that comes late steps by m over a share of its tensor's v, not by m / eps."""
    monkeypatch.setattr("hipress.optim.adam.FLOOR", floor)
    table = nn.Embedding(4, 8)
    optimizer = optim.AdamW(table.parameters(), lr=0.01, freeze=5, weight_decay=0.0)
    before = table.weight[3].detach().clone()
    for step in range(8):
        optimizer.zero_grad()
        rows = torch.tensor([0, 1] if step < 7 else [0, 3])
        table(rows).square().sum().backward()
        optimizer.step()
    moved = (table.weight[3] - before).abs().max().item()
    assert moved > 0
    assert moved < bound if floor else moved > 1e3


def test_tensors_never_seen_step_as_others_do():
    used, late = (nn.Parameter(torch.ones(6)) for _ in range(2))
    optimizer = optim.AdamW([used, late], lr=0.01, freeze=5, weight_decay=0.0)
    for step in range(8):
        used.grad = torch.full((6,), 2.0)
        late.grad = torch.full((6,), 2.0) if step == 7 else None
        optimizer.step()
    assert late.detach().numpy() == pytest.approx(1 - 0.01 * np.ones(6), rel=1e-3)


@pytest.mark.parametrize("group", [64, 256])
def test_feedback_of_elements_without_momentum_does_not_grow(group):
    """Half of a group has gradients, the other half none: the feedback of the latter, and the sum
    of their steps, stay near the scale of one step."""
    codec = compll.compile("onebit_fine", group=group)
    n, random = 2 * group, np.random.default_rng(0)
    idle = np.arange(n) % 2 == 1
    state, momentum, total = codec.init_state(n), np.zeros(n, np.float32), np.zeros(n)
    for _ in range(400):
        gradient = np.where(idle, 0, 1 + random.normal(size=n)).astype(np.float32)
        payload = codec.encode(gradient + np.float32(0.9 / 0.1) * 0.1 * momentum, state=state)
        momentum = codec.decode(payload, n)
        total += momentum * idle
    scale = abs(momentum).max()
    assert abs(state["residual"][idle]).max() < 3 * scale
    assert abs(total).max() < 30 * scale


def test_auto_freezes_when_the_sum_of_v_has_settled():
    """With b2 = .9: v is within 4% of its value ten steps before from the 35th step on."""
    frozen = []
    for noise in (0.0, 1.0):
        parameter = nn.Parameter(torch.zeros(1000))
        optimizer = optim.AdamW([parameter], betas=(0.9, 0.9))
        random = torch.Generator().manual_seed(0)
        for step in range(60):
            growth = 1 + noise * step  # never settles
            parameter.grad = growth * torch.randn(1000, generator=random)
            optimizer.step()
            if optimizer.averaging:
                break
        frozen.append(step)
    assert 25 <= frozen[0] <= 45
    assert frozen[1] == 59


def test_auto_waits_for_the_warm_up():
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = optim.AdamW([parameter], betas=(0.9, 0.9))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 50)
    random = torch.Generator().manual_seed(0)
    steps = 0
    while steps < 80 and not optimizer.averaging:
        parameter.grad = torch.randn(1000, generator=random)
        optimizer.step()
        schedule.step()
        steps += 1
    assert 50 < steps < 62


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": 0}, "freeze is a number of steps"),
        ({"freeze": "soon"}, "freeze is a number of steps"),
        ({"amsgrad": True}, "amsgrad=True cannot go on after a freeze"),
        ({"max_norm": -1.0}, "max_norm is a finite positive number"),
        ({"max_norm": 1.0, "rank_norm": 0}, "rank_norm is a finite positive number"),
        ({"rank_norm": 2.0}, "rank_norm goes with max_norm"),
        ({"scaler": 2.0}, "scaler is a torch.amp.GradScaler"),
        ({"fused": True, "scaler": torch.amp.GradScaler("cpu")}, "fused=True unscales"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        optim.AdamW([nn.Parameter(torch.ones(2))], **options)


def test_sgd_needs_momentum():
    with pytest.raises(ConfigError, match=r"use torch\.optim\.SGD"):
        optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def test_hooks_run_once_and_copies_go_on():
    model = make()
    torch.optim.AdamW(make().parameters())  # whose step torch then wraps
    optimizer = optim.AdamW(model.parameters(), freeze=3, max_norm=1.0, rank_norm=2.0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    fit(model, optimizer, range(2))
    assert len(calls) == 2
    again = copy.deepcopy(optimizer)
    assert (again.freeze, again.max_norm, again.rank_norm) == (3, 1.0, 2.0)


def test_muon_is_that_of_torch():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("came with torch 2.9")
    models = []
    for module in (optim, torch.optim):
        model = nn.Linear(6, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(24.0).view(4, 6).sin())
        optimizer = module.Muon(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.eye(6) + step).square().sum().backward()
            optimizer.step()
        models.append(model.weight.detach())
    assert torch.equal(*models)


def stepped(optimizer, model, squares):
    """Step by gradients of norm 4, by ranks with these squared norms where it is asked for them."""
    for square in squares:
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 4 / parameter.numel() ** 0.5)
        if optimizer.samples:
            optimizer.phase.rank_square = torch.tensor(square)
        optimizer.step()


def test_ranks_clip_to_the_ratio_of_norms_before_the_freeze():
    """Squared norms of ranks weigh .9 as much as those four steps later; the others do not count,
    nor does one that is not finite."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = optim.AdamW(model.parameters(), freeze=12, max_norm=0.5)
    assert optimizer.samples
    stepped(optimizer, model, [32.0, 1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 64.0])
    assert optimizer.rank_norm == 0.5
    again = optim.AdamW(model.parameters(), freeze=12, max_norm=0.5)
    again.load_state_dict(optimizer.state_dict())
    wanted = 0.5 * ((0.9 * 32 + 64) / (1.9 * 16)) ** 0.5
    for each in (optimizer, again):
        each.freeze_now()
        assert not each.samples
        assert each.rank_norm == pytest.approx(wanted)
    frozen = optim.AdamW(model.parameters(), freeze=12, max_norm=0.5)
    frozen.load_state_dict(optimizer.state_dict())
    assert frozen.rank_norm == optimizer.rank_norm


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"max_norm": 0.5, "rank_norm": 2.0}, 2.0),
        ({"max_norm": 0.5, "freeze": None}, 0.5),
        ({}, None),
    ],
)
def test_norms_are_compared_only_if_that_is_needed(options, wanted):
    optimizer = optim.AdamW(make().parameters(), **options)
    assert not optimizer.samples
    optimizer.freeze_now()
    assert optimizer.rank_norm == wanted


def test_ranks_clip_to_max_norm_at_least():
    model = nn.Linear(4, 4, bias=False)
    optimizer = optim.AdamW(model.parameters(), freeze=1, max_norm=0.5)
    stepped(optimizer, model, [4.0])
    optimizer.freeze_now()
    assert optimizer.rank_norm == 0.5


@pytest.mark.parametrize("falls, told", [(False, True), (True, False)])
def test_a_freeze_that_cost_loss_in_measurements_is_told(falls, told):
    """With figures; where the rate falls, early freezes cost nothing."""
    model = make()
    optimizer = optim.AdamW(model.parameters(), freeze=20)
    texts = []
    for step in range(20):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - falls * step / 20)
        fit(model, optimizer, range(step, step + 1))
        texts.append(optimizer.early)
    assert not optimizer.averaging
    assert optimizer.due()
    if not told:
        assert optimizer.early == ""
        return
    assert "frozen after 20 steps" in optimizer.early
    assert re.search(r"has changed by \d+%, at most \d+%, since step 10", optimizer.early)
    later = optim.AdamW(model.parameters(), freeze=150)
    later.load_state_dict(optimizer.state_dict())
    for state in later.state.values():
        state["step"].fill_(150)
    assert later.due()
    assert later.early == ""
