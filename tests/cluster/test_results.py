"""Results of a benchmark: read back, compared, judged, and drawn."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from hipress.errors import ConfigError
from hipress.tools import charts, results
from hipress.tools.bench import measure, page
from hipress.tools.bench.measure import Suite
from hipress.tools.bench_command import app
from hipress.tools.results import Results, Trace
from hipress.tools.run.figures import Report
from hipress.tools.run.jobs import Curve, Result, Workload
from hipress.tools.tracing.spans import BACKWARD, DECODE, ENCODE, WIRE, Point, Process, Span


def a_result(method, step=0.2, losses=(), **more):
    curve = Curve([step] * len(losses), list(losses))
    given = {"payload_bytes": 1e6, "wire_bytes": 1.01e6, "identical": True, "curves": [curve]}
    seconds = [step] * max(len(losses), 4)
    kept = list(losses or [5.0] * 4)
    return Result(method, method, 2, 0, seconds, kept, **{**given, **more})


def a_report(*found, **more):
    return Report("two hosts", 2, "1gbit", 4, Workload(), list(found), "hipress bench", **more)


def falling(to, steps=200):
    return [10 - (10 - to) * step / steps for step in range(steps)]


def a_trace(method):
    spans = (Span(BACKWARD, 0.0, 0.1), Span(ENCODE, 0.05, 0.06, 0), Span(WIRE, 0.06, 0.12, 0))
    later = (*spans, Span(DECODE, 0.12, 0.15, 0))
    sweep = [
        Point(b * 1.25e8, 0.2 + 0.01 / b, 0.2 + 0.32 / b, 0.2 + 0.16 / b) for b in (0.1, 1, 99)
    ]
    return Trace(
        method, method, Process("rank 0", later), Process("predicted", spans), 0.1, 0.1, sweep
    )


@pytest.fixture
def measured():
    return Results(
        [
            a_report(
                a_result("none"),
                a_result("ddp-fp32", 0.4, falling(4)),
                a_result("hipress:int4_group", 0.2, falling(4)),
                a_result("hipress:onebit_group", 0.1, falling(6)),
                Result("powersgd", "powersgd", 2, error="rank 1: out of memory"),
            )
        ],
        [[a_trace("hipress:int4_group")]],
    )


def test_results_read_back(measured, tmp_path):
    measured.write(tmp_path / "bench.json")
    assert Results.read(tmp_path / "bench.json") == measured


@pytest.mark.parametrize(
    "text, told",
    [
        ('{"reports": [', ":1:14: no JSON"),
        ("[]", "no results of `hipress bench`"),
        ('{"reports": [], "format": 99}', "format 99; this reads 1"),
        ('{"reports": [{}], "format": 1}', "reports[0]: 'place' is missing"),
        ('{"reports": [3], "format": 1}', "reports[0]: expected a mapping, found 3"),
        ('{"reports": [], "format": 1, "more": 1}', "unknown key 'more'"),
        ('{"format": 1}', "'reports' is missing"),
        pytest.param(
            '{"a": "\\n]]",\n "b": ' + "[" * 99_999, ":2:22: nested more than 16 deep", id="deep"
        ),
        pytest.param('{"format": 1' + "0" * 5000 + "}", "Exceeds the limit", id="digits"),
    ],
)
def test_a_malformed_result_is_refused_with_its_place(text, told, tmp_path):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bench\.json") as error:
        Results.read(tmp_path / "bench.json")
    assert told in str(error.value)


HOSTILE = ("[red]a", "[/nothing]", "\x1b[2J", "\ud800", ":smile:", "$a$ $\\b{", "\u202eb")


def test_names_of_a_file_are_shown_as_they_are(measured, tmp_path):
    """No markup, no escapes of terminals, nothing that UTF-8 cannot write."""
    data = asdict(measured)
    labels = iter(HOSTILE)
    rows = [row for row in data["reports"][0]["results"] if row["error"] is None]
    more = [{**rows[0], "method": f"m{i}"} for i in range(len(HOSTILE))]
    for row in more:
        row["label"] = next(labels)
    data["reports"][0]["results"], data["version"] = more, "\x1b[31m"
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(data))
    done = CliRunner().invoke(app, ["compare", str(path), str(path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for label in ("[red]a", "[/nothing]", r"\x1b[2J", r"\ud800", ":smile:", "$a$", r"\u202eb"):
        assert label in done.output


@pytest.mark.parametrize(
    "change, told",
    [
        ({"seconds": "fast"}, "reports[0].results[0].seconds: expected a list, found 'fast'"),
        ({"seconds": [None]}, "reports[0].results[0].seconds[0]: expected a number, found None"),
        ({"seconds": []}, "'none' has no losses, or no timed steps"),
        ({"seconds": [0.0] * 4}, "'none' has no losses, or no timed steps"),
        ({"losses": []}, "'none' has no losses, or no timed steps"),
        ({"warmup": 1.5}, "reports[0].results[0].warmup: expected a whole number, found 1.5"),
        ({"phases": []}, "reports[0].results[0].phases: expected a mapping, found []"),
    ],
)
def test_values_of_another_type_are_refused(measured, change, told, tmp_path):
    data = asdict(measured)
    data["reports"][0]["results"][0] |= change
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(data))
    done = CliRunner().invoke(app, ["compare", str(path), str(path)])
    assert (done.exit_code, done.output.strip()) == (2, f"hipress bench: {path}: {told}")


def test_charts_show_formulas_as_text(measured):
    named = replace(measured.reports[0].results[1], label="$a$ $\\b{")
    assert ">$a$ $\\b{<" in charts.steps(a_report(named))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the file: No such file"):
        Results.read(tmp_path / "missing.json")


def test_the_time_until_the_loss_that_fp32_ends_with(measured):
    reached = {each.method: each for each in results.times_to_loss(measured.reports[0].results)}
    assert set(reached) == {"ddp-fp32", "hipress:int4_group", "hipress:onebit_group"}
    assert reached["ddp-fp32"].median == pytest.approx(200 * 0.4)
    assert reached["hipress:int4_group"].median == pytest.approx(200 * 0.2)
    assert reached["hipress:onebit_group"].median is None  # its loss stays above


def test_a_round_that_does_not_get_there_leaves_no_median():
    found = results.TimeToLoss("a", "a", (1.0, None, 2.0))
    assert found.median is None


def test_a_short_run_says_nothing_of_losses():
    short = [a_result("ddp-fp32", losses=falling(4, 50)), a_result("hipress:topk")]
    assert not results.times_to_loss(short)


@pytest.mark.parametrize(
    "wire, agree", [(0.9e6, False), (1.0e6, True), (1.05e6, True), (1.2e6, False)]
)
def test_bytes_of_counters_and_interface(wire, agree):
    report = a_report(a_result("hipress:int4_group", wire_bytes=wire))
    assert (results.bytes_that_differ(report) == []) is agree


def test_bytes_that_repeat_and_stay_at_home_are_not_expected():
    spared = a_result("hipress:int4_group", wire_bytes=0.62e6, phases={"spared_bytes": 0.4e6})
    assert results.bytes_that_differ(a_report(spared)) == []


def test_two_results_compared(measured):
    later = [
        replace(each, seconds=[2 * s for s in each.seconds])
        for each in measured.reports[0].results[:2]
    ]
    after = Results([replace(measured.reports[0], results=later)])
    found = {each.label: each for each in results.compare(measured, after)}
    assert set(found) == {"none", "ddp-fp32"}
    assert found["ddp-fp32"].change == pytest.approx(1.0)
    assert found["ddp-fp32"].verdict == "slower"
    same = {each.verdict for each in results.compare(measured, measured)}
    assert same == {"within the spread"}


def test_other_links_are_not_compared(measured):
    other = Results([replace(measured.reports[0], rate="100mbit")])
    assert results.compare(measured, other) == []


def test_versions_that_differ_are_told(measured):
    versions = {**measured.reports[0].versions, "torch": "1.0"}
    other = Results([replace(measured.reports[0], versions=versions)], version="9.9")
    told = results.differences(measured, other)
    assert any(line.startswith("torch: ") and line.endswith("1.0 after") for line in told)
    assert any(line.startswith("hipress: ") and line.endswith("9.9 after") for line in told)


def test_the_page_has_every_method_chart_and_problem(measured, tmp_path):
    page.write(replace(measured, problems=["The link was not probed."]), tmp_path / "bench.html")
    text = (tmp_path / "bench.html").read_text()
    assert text.count("<svg") == 4
    assert "Predicted to gain at least 2% over bf16: hipress:int4_group up to 1 Gbit/s." in text
    assert "predictions of these steps are off by 20% at most" in text
    assert "The link was not probed." in text
    assert "failed: powersgd: rank 1: out of memory" in text
    assert "hipress:onebit_group takes 100 ms a step, 0.50 of one without" in text
    assert "4.00 times as fast as ddp-fp32 (400 ms)" in text
    assert "not reached" in text
    assert not re.search(r"(src|href)=.http|@import|url\(http", text)  # it loads no other files


def test_charts_are_well_formed_and_name_methods(measured):
    (report,), (traces,) = measured.reports, measured.traces
    drawn = [charts.steps(report), charts.time_to_loss(report), charts.crossover(report, traces)]
    for each in (*drawn, charts.timeline(traces[0])):
        ElementTree.fromstring(each)
        assert "hipress:int4_group" in each


def test_rounds_have_seeds_of_their_own_and_a_curve_each():
    ran = []

    def run(job):
        ran.append((job.method, job.workload.seed))
        return a_result(job.method, losses=[3.0] * job.steps, curves=[])

    found = measure.measure(Suite(("ddp-fp32", "none"), rounds=2, seeds=True), run, lambda _: None)
    assert ran == [("ddp-fp32", 1), ("none", 1), ("ddp-fp32", 2), ("none", 2)]
    assert [len(each.curves) for each in found] == [2, 2]


def test_bytes_and_phases_are_means_of_the_rounds():
    one = a_result("a", phases={"encode_seconds": 1.0})
    two = replace(a_result("a", phases={"encode_seconds": 3.0}), payload_bytes=3e6)
    merged = measure.merge([one, two, Result("a", "a", 2, error="no")])
    assert merged.payload_bytes == 2e6
    assert merged.phases == {"encode_seconds": 2.0}
    assert merged.label == "a (1 of 3 rounds failed)"


def test_json_has_what_a_report_shows(measured, tmp_path):
    measured.write(tmp_path / "bench.json")
    (report,) = json.loads((tmp_path / "bench.json").read_text())["reports"]
    assert report["results"][1]["curves"][0]["losses"][0] == 10
