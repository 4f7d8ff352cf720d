"""Cells of bench.auto: their comparisons, and the conclusions from their times."""

from dataclasses import replace

import pytest
import typer

from bench import auto
from hipress.tools.run.jobs import Job, Result

KEPT = {"plan": "a (ps)", "predicted_seconds": 0.12, "step_seconds": 0.1, "verdict": "kept"}
LEFT = {"plan": "b", "predicted_seconds": 1.0, "step_seconds": None, "verdict": "not tried"}


def steps(median, first=10.0):
    return auto.Steps(median, median, median, first, 1.0, True)


def cell(**more):
    methods = {
        "ddp-fp32": steps(0.4), "ddp-fp16": steps(0.2), "hipress:int4_group": steps(0.1),
        "hipress:auto:optimizer=sgd": steps(0.104, 12.0),
    }  # fmt: skip
    made = auto.Cell(2, "1gbit", "sgd", methods, [KEPT, LEFT], 1, "today", "command", {})
    return replace(made, **more)


def test_auto_is_compared_with_its_candidates_of_few_bits():
    for optimizer in auto.OPTIMIZERS:
        *others, last = auto.methods(optimizer)
        assert last == f"hipress:auto:optimizer={optimizer}"
        assert {*auto.DDP, "hipress:int4_group"} <= {*others}
        assert "hipress:int8_group" not in others


def test_ratios_are_to_the_best_of_each_sort():
    assert cell().ratios == pytest.approx({"fixed": 1.04, "ddp": 0.52, "first": 1.2})
    assert cell().off == pytest.approx([0.2])


def test_missed_aims_are_bold():
    text = "\n".join(auto.tables([cell()]))
    assert (
        "| 2, 1gbit, sgd | a (ps) | 104 | `int4_group` | 100 | 1.04 | `ddp-fp16` | 200 | 0.52 "
        in text
    )
    assert "| 12.0 | 10.0 | **1.20** |" in text
    assert "the first 100 steps beside DDP in fp16, at most 1.1: 0 of 1 met" in text


def test_a_cell_that_is_measured_again_is_replaced(tmp_path):
    auto.record([cell(), cell(hosts=4)], tmp_path)
    again = cell(date="tomorrow")
    assert auto.record([again], tmp_path) == [again, cell(hosts=4)]
    assert auto.record([], tmp_path) == [again, cell(hosts=4)]
    assert (tmp_path / "auto.md").read_text().count("| 2, 1gbit, sgd | a (ps)") == 2


def test_the_first_steps_of_a_short_run_are_filled_with_its_median():
    result = Result("m", "m", 2, warmup=1, seconds=[5.0, 1.0, 1.0])
    assert auto._first(result) == 5.0 + 99
    assert auto._first(replace(result, seconds=[1.0] * 200)) == 100.0


def test_baselines_take_few_steps_on_a_slow_link():
    slow, fast = (
        auto._shortened(Job("ddp-fp32", steps=60), rate) for rate in ("100mbit", "10gbit")
    )
    assert (slow.steps, fast.steps) == (8, 60)
    assert auto._shortened(Job("hipress:auto", steps=60), "100mbit").steps == 60


def test_a_cell_that_there_is_not(capsys, tmp_path):
    with pytest.raises(typer.Exit):
        auto.main(rate=["1tbit"], output=tmp_path)
    assert "choose from 100mbit" in capsys.readouterr().err
