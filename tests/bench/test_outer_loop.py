"""Rows of the outer loop in a table of times to a loss."""

from dataclasses import asdict, replace

from bench.loss_cells import Cell
from bench.outer import Loop, _by_loop, _row


def test_seeds_of_a_loop_are_one_row():
    cell = Cell("gpt", "fp32", 1, 1000, "", 2.0, [2.0] * 100, 32.0, 1.0, "", "", {})
    line = {"steps": 1200, "curve": [3.0] * 60 + [2.05] * 60, **asdict(Loop(every=10, lr=1.0))}
    lines, cells = [{"seed": seed, **line} for seed in (1, 2)], [cell, replace(cell, seed=2)]
    assert _by_loop([*lines, {**lines[0], "every": 30}]) == [lines, [{**lines[0], "every": 30}]]
    name, seconds, steps, minutes = _row(lines, cells, 0.6, 0.03)
    assert name == "outer int4_group, every 10, lr 1, momentum 0.9, of 1200 steps"
    assert (seconds, steps) == ("600", "700, 700")
    assert minutes == "7.0 (7.0 to 7.0)"
    assert _row(lines, cells, 0.6, 0.01)[2:] == ("never, never", "-")
