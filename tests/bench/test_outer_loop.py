"""Rows of the outer loop in a table of times to a loss."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import typer

from bench import outer
from bench.loss_cells import Cell
from bench.outer import Loop, _by_loop, _reached
from bench.time_to_loss import Times
from hipress.tools.run.figures import Report
from hipress.tools.run.jobs import Result, Workload

METHOD = "outer:int4_group:every=10"


def test_seeds_of_a_loop_are_one_row():
    cell = Cell("gpt", "fp32", 1, 1000, "", 2.0, [2.0] * 100, 32.0, 1.0, "", "", {})
    line = {"steps": 1200, "curve": [3.0] * 60 + [2.05] * 60, **asdict(Loop(every=10, lr=1.0))}
    lines, cells = [{"seed": seed, **line} for seed in (1, 2)], [cell, replace(cell, seed=2)]
    others = [{**lines[0], "every": 30}, {**lines[0], "delay": 5}, {**lines[0], "codec": "none"}]
    assert _by_loop([*lines, *others], METHOD) == [lines]
    assert _by_loop(lines, "int4_group") == []
    row = _reached(lines, cells, 0.6, 0.03)
    assert row.method == f"{METHOD}:delay=0:fragments=1:lr=1:momentum=0.9, of 1200 steps"
    assert (row.step_seconds, row.steps, row.minutes) == (0.6, [700, 700], [7.0, 7.0])
    assert _reached(lines, cells, 0.6, 0.01).row[2:] == ("never, never", "-")


def test_seconds_of_a_round_count_each_step():
    """A median of the steps would leave out those that wait for a round."""
    spent = [9.0, *([1.0] * 9 + [11.0]) * 2]  # a warm-up, then two rounds
    result = Result(METHOD, METHOD, 2, warmup=1, seconds=spent)
    times = Times._of(Report("", 2, "", 2, Workload(), [result], ""))
    assert times.seconds == {METHOD: 2.0}


def test_a_loss_is_recorded_once(monkeypatch, tmp_path, capsys):
    """The second seed once stood twice, as if one of them were the third."""
    trained = []

    def curve(*arguments):
        trained.append(arguments)
        return SimpleNamespace(losses=[3.0] * 10, sent=8.0)

    monkeypatch.setattr(outer, "LINES", tmp_path / "outer.jsonl")
    monkeypatch.setattr(outer.loss_hooks, "curve", curve)
    for seed in (1, 2):
        outer.losses(seed=seed)
    outer.losses(seed=2, every=30)
    with pytest.raises(typer.Exit) as exit:
        outer.losses(seed=2)
    assert exit.value.exit_code == 2
    method = "outer:int4_group:every=10:delay=0:fragments=1:lr=1:momentum=0"
    assert f"outer.jsonl has gpt, {method}, seed 2, 1000 steps since 20" in capsys.readouterr().err
    lines = map(json.loads, outer.LINES.read_text().splitlines())
    assert [(each["seed"], each["every"]) for each in lines] == [(1, 10), (2, 10), (2, 30)]
    assert len(trained) == 3
