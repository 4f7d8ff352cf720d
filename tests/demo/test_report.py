"""Tables and the chart, from given figures."""

import dataclasses
import io

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from hipress.tools import charts
from hipress.tools.run import figures
from hipress.tools.run.jobs import Result, Workload


def result(method, label, seconds, payload, loss, identical=True):
    times = [9.0, *(seconds + 0.01 * (i % 5 - 2) for i in range(20))]
    losses = [9.0 - i * 0.1 for i in range(11)] + [loss] * 10
    more = {"peak_bytes": 612e6, "identical": identical}
    return Result(method, label, 2, 1, times, losses, payload, payload * 1.002, **more)


@pytest.fixture
def canned():
    results = [
        result("none", "no communication", 0.115, 0.0, 5.9, None),
        result("ddp-fp32", "DDP fp32", 0.555, 49.4e6, 5.00),
        result("ddp-fp16", "DDP fp16 hook", 0.335, 24.7e6, 5.00),
        result("hipress:onebit_group", "HiPress onebit_group", 0.150, 1.6e6, 5.05),
        Result("powersgd", "DDP PowerSGD rank 4", 2, error="rank 1: broke"),
    ]
    return figures.Report("2 hosts", 2, "1gbit", 21, Workload(), results, "hipress demo")


def text(tables, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(tables)
    return console.file.getvalue()


def test_figures_are_medians_and_ratios(canned):
    row = figures.rows(canned.results)[3]
    assert row.median == pytest.approx(0.150)
    assert (row.low, row.high) == (pytest.approx(0.13), pytest.approx(0.17))
    assert row.over_fp16 == pytest.approx(335 / 150)
    assert row.over_fp32 == pytest.approx(555 / 150)
    assert row.of_floor == pytest.approx(150 / 115)
    assert row.loss_difference == pytest.approx(0.01)


def test_the_table_fits_eighty_columns_and_names_what_failed(canned):
    shown = text(figures.tables(canned))
    assert "…" not in shown
    for figure in ("2.23x", "3.70x", "1.30", "+1.00%", "24.70", "49.50", "612", "failed", "equal"):
        assert figure in shown
    assert figures.failures(canned) == ["DDP PowerSGD rank 4: rank 1: broke"]


def test_steps_of_an_outer_loop_are_drawn_one_by_one(canned, tmp_path):
    """Its table has means from round to round."""
    loop = result("outer:int4_group:every=5", "HiPress, weights by int4_group", 0.15, 1e6, 5.1)
    assert len(loop.timed) == 4
    assert len(charts._curve(loop).seconds) == len(loop.losses) == 21
    charts.draw(dataclasses.replace(canned, results=[loop]), tmp_path / "chart.png")


def test_ranks_that_differ_are_shouted(canned):
    bad = dataclasses.replace(canned.results[3], identical=False)
    shown = text(figures.tables(dataclasses.replace(canned, results=[bad])))
    assert "DIFFER" in shown


def test_ratios_without_their_baseline_are_left_empty(canned):
    row = figures.rows(canned.results[3:4])[0]
    assert (row.over_fp16, row.over_fp32, row.of_floor, row.loss_difference) == (None,) * 4


def test_markdown_has_a_line_per_method(canned):
    lines = figures.markdown(canned).splitlines()
    assert len({line.count("|") for line in lines[:6]}) == 1
    assert "| HiPress onebit_group | 150 | 130-170 | 2.23x |" in lines[5]


@pytest.mark.parametrize("keep", [5, 1, 3])
def test_the_chart_is_a_picture_of_the_promised_size(canned, tmp_path, keep):
    path = tmp_path / "demo.png"
    charts.draw(dataclasses.replace(canned, results=canned.results[-keep:]), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert [int.from_bytes(data[at : at + 4]) for at in (16, 20)] == [1800, 660]


def test_each_number_of_the_chart_stands_at_its_own_mark(canned):
    twice = dataclasses.replace(canned.results[3], wire_bytes=3.3e6)
    good = figures.rows([canned.results[1], twice, canned.results[0]])
    axes = Figure().subplots()
    charts._sizes(axes, good, {row.result.method: "red" for row in good})
    found = [(text.get_text(), *text.xy) for text in axes.texts]
    at = [(round(float(text), 3), round(x, 1)) for text, x, _ in found]
    assert at == [(49.4, 49.4), (49.5, 49.5), (1.6, 1.6), (3.3, 3.3), (0, 0)]
    marks = [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines]
    assert marks == [found[1][1:], found[3][1:]]
    heights = [y for _, _, y in found]
    assert heights == sorted(heights)
    assert len(set(heights)) == 5  # no number stands on another


def test_the_number_of_a_mark_within_a_bar_stands_beside_the_bar(canned):
    less = dataclasses.replace(canned.results[3], wire_bytes=1e6)
    axes = Figure().subplots()
    charts._sizes(axes, figures.rows([less]), {less.method: "red"})
    assert [(float(text.get_text()), round(text.xy[0], 1)) for text in axes.texts][1] == (1.0, 1.6)
    assert axes.lines[0].get_xdata() == [1.0]


def test_smoothing_is_a_running_mean():
    assert figures.smooth([2, 4, 6, 8], width=2) == [2, 3, 5, 7]
