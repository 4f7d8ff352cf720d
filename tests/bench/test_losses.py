"""The figures of bench.losses: imitated ranks do the same as real ones, and bad codecs show."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench import loss_cells, loss_hooks, loss_ranks, loss_tables, losses
from bench.loss_cells import Cell
from bench.loss_ranks import Compressed, fp32, train
from bench.loss_workloads import WORKLOADS
from hipress.tools.run import corpus, methods, place, runner
from hipress.tools.run.jobs import Job, Workload
from hipress.tools.run.synchronize import Synchronized
from tests.hipress import common, momentum_ranks
from tests.hipress.launch import launch

DIGITS = WORKLOADS["digits"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(method, steps=12, seed=1, workload=DIGITS):
    """The curve, and the final parameters."""
    model = workload.build(seed)
    if method == "fp32":
        found = train(workload, fp32, Synchronized(model), seed, steps, range(2))
    else:
        with Compressed(model, methods.parse(f"hipress:{method}"), 2, seed) as average:
            found = train(workload, average, Synchronized(model), seed, steps, range(2))
    return found, [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow  # two trainings
def test_fp32_is_plain_training_bit_by_bit():
    """The reference is a process with both ranks' batch and the mean of their losses."""
    model = DIGITS.build(1)
    optimizer = DIGITS.training.make(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 12)
    for step in range(12):
        optimizer.zero_grad()
        for rank in range(2):
            (model(*DIGITS.batch(1, rank, step)) / 2).backward()
        optimizer.step()
        schedule.step()
    curve, parameters = trained("fp32")
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    assert math.isfinite(curve.final)
    assert trained("none")[0].losses == curve.losses


@pytest.mark.slow
def test_seeds_differ_in_weights_and_in_the_order_of_data():
    for workload in WORKLOADS.values():
        one, two = (nn.utils.parameters_to_vector(workload.build(s).parameters()) for s in (1, 2))
        assert not torch.equal(one, two)
        batches = [workload.batch(s, r, t)[0] for s in (1, 2) for r in (0, 1) for t in (0, 1)]
        assert not any(
            torch.equal(a, b) for i, a in enumerate(batches) for b in batches[:i]
        )  # fmt: skip
        assert torch.equal(batches[0], workload.batch(1, 0, 0)[0])


def test_held_out_data_is_not_trained_on():
    images, _ = DIGITS.held_out()[0]
    held = {each.numpy().tobytes() for each in images}
    for step in range(50):
        assert held.isdisjoint(each.numpy().tobytes() for each in DIGITS.batch(1, 0, step)[0])


@pytest.mark.slow
def test_a_bad_codec_shows():
    """mxnet_2bit sends nothing before half a unit has gathered, and gradients are far smaller."""
    plain, good, bad = (trained(m, 100)[0].final for m in ("fp32", "int8_group", "mxnet_2bit"))
    assert good == pytest.approx(plain, rel=0.05)
    assert bad > 1.5 * plain


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int4_group", "topk:ratio=0.01", "powersgd:rank=4"])
def test_imitated_ranks_are_real_ranks_bit_by_bit(method):
    """Two processes of `hipress demo` over gloo have the same losses, and send as many bytes."""
    corpus.prepare()
    job = Job(f"hipress:{method}:seed=1", steps=6, workload=Workload())
    with place.choose(2, "1gbit", loopback=True).enter() as here:
        real = runner.run(here, job)
    assert real.error is None
    found, _ = trained(method, 6, workload=WORKLOADS["lstm-sgd"])
    assert found.losses == real.losses
    assert found.sent / 6 == pytest.approx(real.payload_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "clipped"])
def test_imitated_averages_of_momentum_are_real_ones_bit_by_bit(name, monkeypatch):
    """On the model of test_momentum, whose gradients travel uncompressed before a freeze."""
    (wrapped, _), _ = launch(momentum_ranks.ways, 2, name, momentum_ranks.CODEC)
    model = common.make()
    optimizer = momentum_ranks.make_optimizer(name, model)
    parameters = list(model.parameters())
    method = methods.parse(f"hipress:{momentum_ranks.CODEC}")
    with loss_ranks.Averaged(model, optimizer, method, 2, 0) as average:
        monkeypatch.setattr(average, "_before", fp32)
        for step in range(14):
            gradients = []
            for rank in range(2):
                model.zero_grad()
                momentum_ranks.backward(model, rank, step)
                gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
            average(gradients, step)
            nn.utils.vector_to_parameters(gradients[0], [p.grad for p in parameters])
            optimizer.step()
        monkeypatch.undo()
    assert common.digest(model) == wrapped[1]


@pytest.mark.slow
def test_ranks_of_hooks_train_as_imitated_ones_do():
    """Without a hook bit by bit; PowerSGD has two uncompressed steps, and then sends less."""
    plain, _ = trained("fp32")
    ddp, powersgd = (loss_hooks.curve("digits", m, 1, 12, 2) for m in ("ddp-fp32", "powersgd"))
    assert ddp == plain
    same = [a == b for a, b in zip(powersgd.losses, plain.losses, strict=True)]
    assert same[:3] == [True] * 3
    assert not any(same[3:])
    assert powersgd.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1)
    assert powersgd.sent < plain.sent / 3


def test_a_trial_zeroes_states_in_each_turn_and_averages_natively_between():
    model = torch.nn.Linear(20, 30)
    gradient = torch.randn(sum(p.numel() for p in model.parameters()))
    found = []
    with loss_ranks.Tried(model, methods.parse("hipress:onebit_fine"), 2, 1) as average:
        for step in range(33):
            gradients = [gradient.clone(), gradient.clone()]
            average(gradients, step)
            found.append(gradients[0])
    native = [step for step, each in enumerate(found) if torch.equal(each, gradient)]
    assert native == [*range(3), *range(10, 17), *range(24, 31)]
    assert torch.equal(found[3], found[17])
    assert torch.equal(found[3], found[31])
    assert not torch.equal(found[3], found[4])


@pytest.mark.slow
def test_a_cell_that_is_there_is_not_run_again(tmp_path, monkeypatch):
    path, ran = tmp_path / "losses.jsonl", []

    def measure(*key):
        ran.append(key[:4])
        return cell(*key)

    monkeypatch.setattr(losses, "measure", measure)
    losses.main(["digits"], ["fp32", "topk"], 2, [5], path)
    assert ran == [("digits", m, s, 5) for m in ("fp32", "topk") for s in (1, 2)]
    losses.main(["digits"], ["fp32", "topk"], 3, [5], path)
    assert ran[4:] == [("digits", "fp32", 3, 5), ("digits", "topk", 3, 5)]
    assert len(loss_cells.read(path)) == 6


@pytest.mark.parametrize(
    "workload, method, told",
    [("digit", "fp32", "'digit'"), ("digits", "topk:rato=1", "rato"), ("digits", "tpk", "topk")],
)
def test_unknown_methods_and_workloads_are_refused_before_running(workload, method, told, capsys):
    with pytest.raises(losses.typer.Exit):
        losses.main([workload], [method])
    assert told in capsys.readouterr().err


def cell(workload="digits", method="fp32", seed=1, steps=200, data="d", loss=1.0, **more):
    return Cell(workload, method, seed, steps, data, loss, [1.0], 32.0, 1.0, "", "", {}, **more)


def test_cells_survive_the_file():
    there = cell(loss=math.nan)
    back = Cell.parse(there.line())
    assert math.isnan(back.loss)
    assert replace(back, loss=1.0) == replace(there, loss=1.0)


def rows_of(plain, ours):
    cells = [cell(seed=s, loss=v) for s, v in enumerate(plain)]
    cells += [cell(seed=s, loss=v, method="topk") for s, v in enumerate(ours)]
    return {row.method: row for row in loss_tables.rows(cells)}


KEPT, LOST, NEITHER = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    "plain, ours, told",
    [
        ([1.0], [1.009], KEPT),
        ([1.0], [1.011], LOST),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.02], KEPT),
        ([0.9, 1.0, 1.1], [0.9, 1.03, 1.11], KEPT),  # 1.3%, with a standard error of 0.9%
        ([0.9, 1.0, 1.1], [0.92, 1.02, 1.13], LOST),  # 2.3 and 0.3: surely more than 1%
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.09], NEITHER),  # 3 and 3: a loss of 0 to 9%
        ([1.0, 1.2], [1.009], KEPT),  # one seed, against the same one of fp32
        ([1.0, 1.2], [1.011], LOST),
        ([1.0, 1.0], [1.0, math.nan], LOST),
    ],
)
def test_kept_and_lost_as_far_as_seeds_can_tell(plain, ours, told):
    finding = rows_of(plain, ours)["topk"].finding("", {}, {})
    assert (finding.kept, finding.lost) == told


def test_nothing_is_compared_with_other_data_or_other_steps():
    cells = [cell(), cell(method="topk", data="other"), cell(method="topk", steps=100)]
    assert [row.method for row in loss_tables.rows(cells)] == ["fp32"]


def test_a_table_has_the_mean_and_the_spread():
    found = rows_of([1.0, 1.2], [1.1, 1.32])
    rows = list(loss_tables.table(list(found.values()), 200))
    assert rows[0][:3] == ("fp32", "32", "1.100 (-9.1% to +9.1%)")
    assert rows[1][:3] == ("topk", "32", "**+10.00% (+9.1% to +10.9%)**")
    assert not list(loss_tables.table(list(found.values()), 100))
