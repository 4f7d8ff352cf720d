"""Published results: the file's numbers, systems by hand, and errors of predictions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from bench.published import ablation, data, emulated, others
from bench.published.__main__ import main, ordered
from bench.published.data import Cell
from bench.published.hipress_paper import Paper
from bench.published.readiness import readiness
from bench.published.systems import (
    Features,
    Kernels,
    Stack,
    Training,
    byteps,
    collectives,
    hipress,
    ring,
)
from hipress.errors import ConfigError
from hipress.tools.models.device_speeds import DEVICES
from hipress.tools.simulate.cluster import Cluster, Link

SLOWS = replace(DEVICES["v100"], slows=0.0)
CLUSTER = Cluster(4, 2, SLOWS, Link(1e9, 0.0), Link(1e12, 0.0), 1e12)


@pytest.fixture(scope="module")
def published():
    return data.load()


def one(size=1e8, ready=1.0, backward=1.0):
    return Training((size,), (ready,), 0.5, backward)


def test_every_number_says_what_it_is(published, tmp_path):
    counted = data.kinds(published)
    assert set(counted) == set(data.KINDS)
    assert counted["fitted"] < counted["predicted"]
    path = tmp_path / "published.yaml"
    path.write_text("hipress:\n  nodes: 16\n  nic: 10 Gbit guessed\n  inside: 3 parsecs assumed\n")
    with pytest.raises(ConfigError) as raised:
        data.load(path)
    places = [line.split(":")[1:3] for line in str(raised.value).splitlines()]
    assert places == [["2", "10"], ["3", "8"], ["4", "11"]]


def test_a_ring_by_hand():
    """A gradient of 100 MB: 7/8 of it twice over a link of 1 GB/s, after all is computed."""
    stack = Stack(cycle=0.0)
    assert ring(one(), CLUSTER, stack) == pytest.approx(1.5 + 2 * 7 / 8 * 0.1)
    slow = replace(CLUSTER, between=Link(1e9, 0.0, 0.5, 1e-3))
    assert ring(one(), slow, stack) == pytest.approx(1.5 + 2 * 7 * (1e-3 + 0.1 / 8 / 0.5))


def test_collectives_take_what_is_ready_up_to_a_limit():
    """The first is alone; meanwhile the second and third get ready, and the pass loses half."""
    work = Training((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 8.0), 0.0, 8.0)
    sent = []

    def seconds(size, count):
        sent.append((size, count))
        return 4.0

    done, over = collectives(work, seconds, Stack(most=5.0, cycle=0.0), 0.5)
    assert sent == [(1, 1), (5, 2), (4, 1)]
    assert done == [5, 9, 9, 16]  # 1 to 5, 5 to 9; then 8 - 5 = 3 seconds more
    assert over == 12
    assert collectives(work, seconds, Stack(most=1.0, cycle=0.0), 0.0)[0] == [5, 9, 13, 17]


def test_servers_and_compression_by_hand():
    """Three quarters of a gradient leave a node, to servers and back, in one message."""
    stack = Stack(server=1e9, partition=1e9)
    assert byteps(one(), CLUSTER, stack) == pytest.approx(1.5 + 0.1 * (0.75 + 1 + 0.75), rel=1e-3)
    cpu = Kernels(0.1, 2e-9, 3e-9, 0.0)
    expected = 0.1 * (2 + 0.075 + (3 + 2 / 4) + 0.075 + 3)
    assert byteps(one(), CLUSTER, stack, cpu) == pytest.approx(1.5 + expected, rel=1e-3)
    alone = replace(CLUSTER, nodes=1)
    assert byteps(one(), alone, stack) == pytest.approx(1.5, rel=1e-3)


def test_pipelining_and_bulk_make_a_predicted_step_faster():
    work = Training((4e6,) * 20, tuple(0.01 * i for i in range(1, 21)), 0.1, 0.2)
    cluster = replace(CLUSTER, between=Link(1e7, 0.0, 1.0, 1e-3))
    kernels = Kernels(1 / 32, 1e-11, 1e-11, 1e-4)
    off = Features(pipeline=False, bulk=False, planned=False)
    steps = [
        hipress(work, cluster, Stack(), kernels, "ps", each)
        for each in (off, replace(off, pipeline=True), replace(off, pipeline=True, bulk=True))
    ]
    assert steps == sorted(steps, reverse=True)
    small = Training((1e5,), (0.2,), 0.1, 0.2)
    assert hipress(small, cluster, Stack(), kernels) == pytest.approx(0.3 + 2 * 0.75e-2, rel=0.01)


def test_roofline_and_measured_ready_times():
    """Errors are at most 3% of the pass; by elements they are larger for each model."""
    found = [*readiness()]
    assert len(found) == 8
    assert max(each.roofline for each in found) < 0.03
    assert all(each.elements > 2 * each.roofline for each in found)


def test_the_ablation_comes_out_in_the_published_order(published):
    cells = [*ablation.ablation(published["ablation"])]
    assert ablation.in_order(cells)
    assert not ablation.in_order([replace(cells[0], predicted=1e9), *cells[1:]])
    fitted = [each.error for each in cells if each.kind == "fitted"]
    assert fitted == pytest.approx([0, 0], abs=1e-3)


def test_fitted_cells_do_not_count_as_predicted(published):
    cells = [*others.sdp4bit(published["sdp4bit"])]
    exact = [each for each in cells if each.kind == "fitted"]
    assert [each.error for each in exact] == pytest.approx([0, 0], abs=1e-9)
    faster = [each.over_none for each in others.sidco(published["sidco"])]
    assert faster == sorted(faster, reverse=True)


def test_orders_of_systems():
    slow, fast = (Cell("e", "m", name, p, p, "predicted") for name, p in (("a", 1.0), ("b", 2.0)))
    assert ordered([slow, fast])
    assert not ordered([slow, replace(fast, predicted=0.5)])
    assert ordered(
        [replace(slow, published=1.9), replace(fast, predicted=0.5)]
    )  # too close to decide


@pytest.mark.slow
def test_emulated_hosts_are_predicted_from_a_description(published):
    """Three numbers are fitted, to float32 and int4_group under SGD; all others are predicted."""
    hosts = emulated.Emulated.of(published["emulated"])
    cells = [*hosts.cells([*emulated.read_places(published["emulated"])])]
    assert {each.column for each in cells if each.kind == "fitted"} == set(emulated.FITTED)
    count, median, worst = emulated.quality(cells)
    assert count > 70
    assert median < 0.07
    assert worst < 0.25


@pytest.mark.slow
def test_predictions_are_as_good_as_the_documentation_says(tmp_path, published):
    import typer

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--charts", str(tmp_path)], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    last = result.output.strip().splitlines()[-1]
    found = re.fullmatch(
        r"predicted cells within 15%: (\d+) of (\d+); exposed within 30%: (\d+) of (\d+)", last
    )
    near, cells, exposed, steps = map(int, found.groups())
    assert near > 0.75 * cells > 100
    assert exposed > 0.7 * steps > 5
    assert "order of systems as published: 6 of 6" in result.output
    assert len([*tmp_path.glob("*.png")]) == 3
    curves = [*Paper(published["hipress"]).curves()]
    assert sum(abs(each.error) <= 0.15 for each in curves) >= 0.9 * len(curves)
