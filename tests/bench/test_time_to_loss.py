"""Times until a loss: curves of losses.jsonl by step times of bench.training."""

from dataclasses import dataclass

import pytest

from bench import time_chart
from bench.loss_cells import Cell
from bench.time_to_loss import Times, in_full, reach, reached
from hipress.tools.results import Results
from hipress.tools.run.figures import Report
from hipress.tools.run.jobs import Result, Workload
from tests.bench.test_losses import cell


def test_a_loss_is_reached_by_the_mean_of_a_window():
    falling = [10.0 - 0.1 * at for at in range(100)]  # means of ten steps
    at = reached(falling, 5.0)
    assert at is not None
    assert sum(falling[at // 10 - 10 : at // 10]) / 10 <= 5.0
    assert sum(falling[at // 10 - 11 : at // 10 - 1]) / 10 > 5.0
    assert reached(falling, 0.1) is None


def test_momentum_takes_the_steps_of_its_warm_up_until_the_freeze(tmp_path):
    methods = {"ddp-fp32": 3.0, "hipress:int4_group": 2.0, "momentum:onebit_fine:freeze=2": 1.0}
    results = [
        Result(name, name, 2, warmup=1, seconds=[9.0, seconds], losses=[5.0, 5.0])
        for name, seconds in methods.items()
    ]
    path = tmp_path / "bench.json"
    Results([Report("2 hosts", 2, "1gbit", 2, Workload(), results, "hipress bench")]).write(path)
    (times,) = Times.read(path)
    assert times.until("fp32", 600, 1000) == 1800
    assert times.until("momentum:onebit_fine", 100, 1000) == 200
    assert times.until("momentum:onebit_fine", 600, 1000) == 150 * 2 + 450 * 1
    cells = [_cell("fp32", 0.0), _cell("momentum:onebit_fine", 0.001), _cell("int4_group", 0.5)]
    found = {each.method: each.row for each in reach(cells, "lstm-adamw", 1000, times)}
    assert found["fp32"][1:3] == ("3000", "990")  # as 1% above is enough
    assert found["int4_group"][2:] == ("never", "-")
    assert float(found["momentum:onebit_fine"][3].split()[0]) == pytest.approx(1140 / 60, rel=0.02)


def test_a_training_in_full_is_told_with_its_own_seconds():
    falling = [10.0 - 0.05 * (at // 10) for at in range(1000)]  # as the cell's curve
    trained = {"bf16": (falling, [3.0] * 500 + [6.0] * 500), "none": (falling[:10], [1.0] * 10)}
    times = Times("2 hosts", {"bf16": 4.0, "none": 1.0}, trained)
    (told,) = in_full([_cell("fp32", 0.0)], "lstm-adamw", 1000, times, slack=0.02)
    assert told == "bf16, trained in full: 980 steps, 73.0 minutes"
    assert not [*in_full([], "lstm-adamw", 1000, times)]


@dataclass(frozen=True)
class Timed:
    method: str
    minutes: list[float]


def test_a_chart_has_a_bar_for_what_reaches_the_loss_and_words_for_what_does_not(
    tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(time_chart.plt, "close", drawn.append)
    methods = [Timed("momentum:onebit_fine", [1.0, 3.0]), Timed("bf16", [])]
    places = {"links of 100mbit": methods, "links of 1gbit": methods[1:]}
    time_chart.draw(places, 0.015, tmp_path / "chart.png")
    slow, fast = drawn[0].axes
    assert [bar.get_width() for bar in slow.patches] == [2.0]
    assert [text.get_text() for text in slow.texts] == ["not with each seed", "2.0"]
    assert [text.get_text() for text in fast.texts] == ["not with each seed", "not measured"]
    assert [axes.get_title("left") for axes in (slow, fast)] == ["100 Mbit/s", "1 Gbit/s"]
    assert "1.5% above" in drawn[0].get_suptitle()
    assert (tmp_path / "chart.png").stat().st_size > 1000


def _cell(method: str, more: float) -> Cell:
    curve = [10.0 - 0.05 * at + more for at in range(100)]
    made = cell("lstm-adamw", method, 1, 1000, "data")
    return Cell(**{**made.__dict__, "curve": curve})
