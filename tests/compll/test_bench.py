"""`compll bench`: timing on its own clock, and the command's output."""

import json

import pytest
from typer.testing import CliRunner

import compll
from compll.tools import measure
from compll.tools.cli import app


class Clock:
    """Time that passes only in jobs."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

    def job(self, name, *seconds):
        """A job that takes these seconds, in turn."""
        times = list(seconds)

        def call():
            self.calls.append(name)
            self.now += times[0] if len(times) == 1 else times.pop(0)

        return call


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", found)
    return found


def test_the_median_of_turns_counts_and_the_warm_up_does_not(clock):
    work = {"a": clock.job("a", 90, 80, 5, 1, 2, 3, 4), "b": clock.job("b", 1)}
    found = measure.timings(work, 5, shortest=1)
    assert (found["a"].low, found["a"].median, found["a"].high) == (2, 3, 4)
    assert found["a"].spread == pytest.approx(1 / 3)
    assert found["b"] == measure.Timing(1, 1, 1)
    assert clock.calls[4:] == ["a", "b"] * 5


def test_short_jobs_are_repeated_until_the_clock_can_see_them(clock):
    found = measure.timings({"a": clock.job("a", 1e-6)}, 3, shortest=1e-3)
    assert found["a"].median == pytest.approx(1e-6)
    assert len(clock.calls) >= 3000


def test_the_wait_for_started_work_counts(clock):
    waiting = clock.job("wait", 7)
    assert measure.timings({"a": clock.job("a", 1)}, 1, waiting)["a"].median == 8


def test_rates_follow_from_times_and_traffic():
    bench = measure.prepare(compll.compile("onebit"), 1024)
    times = {"copy": 8e-6, "encode": 2e-6, "encode_feedback": 8e-6, "decode": 4e-6}
    took = {name: measure.Timing(t, t, t) for name, t in (times | {"decode_add": 4e-6}).items()}
    row = measure.row(bench, took)
    assert row.copy == pytest.approx(1.024)
    assert row.payload == 132
    assert row.ratio == pytest.approx(4096 / 132)
    fed = row.encoding
    assert fed.rate == pytest.approx(0.512)
    assert fed.moved == 20.125
    # 20.125 bytes per element at 1.024 GB/s would take 20.125 us
    assert fed.share == pytest.approx(20.125 / 8)
    assert row.rates["decode"].moved == pytest.approx(4 + 132 / 1024)
    assert row.rates["decode_add"].moved == pytest.approx(8 + 132 / 1024)


def test_adding_a_sparse_payload_touches_only_what_it_holds():
    bench = measure.prepare(compll.compile("topk", ratio=0.25), 4096)
    assert measure.bytes_moved(bench, "decode_add") == pytest.approx(0.25 * (8 + 8))


def test_a_merge_reads_what_comes_in_beside_what_its_encode_touches(monkeypatch):
    """onebit_group's tile is decoded, added and encoded in one kernel: gradient (4 B), payload in
    and out (.129 B each), residual read and written (8 B), and the gradient written back (4 B)."""
    bench = measure.prepare(compll.compile("onebit_group"), 4096)
    assert measure.bytes_moved(bench, "merge") == pytest.approx(16 + 2 * 132 / 1024)
    seen = []
    monkeypatch.setattr(bench.codec.backend, "encode_batch", lambda *args: seen.append(args[-1]))
    bench.jobs["merge"]()
    (how,) = seen
    assert how.writeback
    assert how.incoming.used[0] == bench.payload


def test_unfused_specs_have_no_merge_time():
    assert "merge" not in measure.prepare(compll.compile("onebit", "reference"), 4096).jobs


@pytest.mark.parametrize("name", compll.list_specs())
def test_every_spec_can_be_measured(name):
    bench = measure.prepare(compll.compile(name, "reference"), 2048)
    for operation in bench.jobs:
        bench.jobs[operation]()
        assert 0 < measure.bytes_moved(bench, operation) < 200


def run(*args):
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_the_command_writes_a_table_json_and_a_plot(tmp_path):
    data, plot = tmp_path / "bench.json", tmp_path / "roofline.svg"
    result = run(
        "onebit", "dgc", "--sizes", "1k,4096", "--repeat", 1, "--json", data, "--plot", plot
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("onebit") == 2
    assert "…" not in result.output
    found = json.loads(data.read_text())
    assert [(r["codec"], r["elements"]) for r in found["rows"]] == [
        ("onebit", 1000), ("dgc", 1000), ("onebit", 4096), ("dgc", 4096),
    ]  # fmt: skip
    assert set(found["rows"][0]["rates"]) == set(measure.OPERATIONS) - {"merge"}
    assert "encode" not in found["rows"][1]["rates"], "dgc has no encode without its state"
    assert all(rate["rate"] > 0 for row in found["rows"] for rate in row["rates"].values())
    assert "llvmlite" in found["about"]
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    "args, words",
    [
        (("onebit", "--sizes", "many"), "size 'many': expected a number"),
        (("onebit", "--sizes", "0"), "size '0'"),
        (("onebit", "--sizes", "1k,"), "size ''"),
        (("onebit", "--target", "cpuu"), "did you mean 'cpu'?"),
    ],
)
def test_mistakes(args, words):
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.output
