"""Spans of a step: their file, their sums, and a traced training with its prediction."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hipress.tools.cli import app
from hipress.tools.tracing.spans import BACKWARD, BUCKET, ENCODE, WIRE, Process, Span, write

ROOT = Path(__file__).parents[2]
TIMES = st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted)


@pytest.fixture
def step():
    return Process(
        "rank 0",
        (
            Span(BACKWARD, 0.0, 1.0),
            Span(BUCKET, 0.5, 1.5, 0),
            Span(ENCODE, 0.5, 0.7, 0, "encode rank=0"),
            Span(WIRE, 0.7, 1.2, 0),
            Span(WIRE, 0.9, 1.3, 0),
        ),
    )


def test_sums_count_what_overlaps_once(step):
    assert step.busy()[WIRE] == pytest.approx(0.6)
    assert step.busy()[ENCODE] == pytest.approx(0.2)
    assert step.seconds == 1.5
    assert step.exposed == pytest.approx(0.5)


@given(st.lists(TIMES, min_size=1, max_size=20))
def test_a_sum_is_at_most_the_span_of_time_and_at_least_the_longest(times):
    spans = tuple(Span(WIRE, begin, end) for begin, end in times)
    busy = Process("", spans).busy()[WIRE]
    first, last = min(begin for begin, _ in times), max(end for _, end in times)
    assert max(end - begin for begin, end in times) - 1e-9 <= busy <= last - first + 1e-9


def written(processes, folder):
    write(processes, folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_the_file_names_processes_lanes_and_tasks(step, tmp_path):
    events = written([step, Process("predicted", step.spans)], tmp_path)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0", "predicted"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    assert lanes == {"pass", "buckets", "codec", "wire", "wire 2"}
    (encode,) = [e for e in events if e["name"] == "encode bucket 0" and e["pid"] == 0]
    assert (encode["ts"], encode["dur"]) == pytest.approx((5e5, 2e5))
    assert encode["args"] == {"task": "encode rank=0"}
    by_process = [{e["name"] for e in events if e["ph"] == "X" and e["pid"] == p} for p in (0, 1)]
    assert by_process[0] == by_process[1]


@given(st.lists(TIMES, max_size=20))
def test_spans_of_a_row_do_not_overlap(tmp_path_factory, times):
    spans = tuple(Span(WIRE, begin, end) for begin, end in times)
    events = written([Process("", spans)], tmp_path_factory.mktemp("trace"))
    rows = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        assert event["ts"] >= rows.get(event["tid"], 0) - 1e-3
        rows[event["tid"]] = event["ts"] + event["dur"]


@pytest.mark.parametrize(
    "options, told",
    [
        (["--method", "ddp-fp32"], "expected a compressor by hipress.wrap"),
        (["--method", "hipress:auto"], "expected a compressor by hipress.wrap"),
        (["--method", "hipress:int4"], "unknown method"),
        (["--rate", "fast"], "fast"),
        (["--model", "gpt"], "package.module:function"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(options, told, tmp_path):
    done = CliRunner().invoke(app, ["trace", *options, "--output", str(tmp_path / "trace.json")])
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.slow
def test_a_traced_step_has_the_tasks_that_were_predicted(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "hipress.tools.cli", "trace", "--loopback", "--steps", "4"],
        cwd=tmp_path, env=environment, check=True, timeout=280, capture_output=True, text=True,
    )  # fmt: skip
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [{e["name"] for e in events if e["ph"] == "X" and e["pid"] == p} for p in range(3)]
    assert found[0] == found[1] == found[2]
    assert "encode bucket 0" in found[2]
    assert "Where a step's time goes" in done.stdout
