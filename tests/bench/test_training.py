"""The benchmark's arithmetic: rounds are combined, targets are checked."""

import json
from pathlib import Path

import pytest
import typer

from bench import picture, training
from bench.commands import RESULTS
from hipress.tools.bench import measure
from hipress.tools.bench.measure import Suite
from hipress.tools.results import Results
from hipress.tools.run import methods
from hipress.tools.run.figures import Report, Workload, rows
from hipress.tools.run.jobs import Result


def result(method, seconds, loss=5.0, losses=None, **more):
    losses = losses or [loss] * 12
    return Result(method, method, 2, 1, [9.0, *seconds], losses, 1.0, 1.0, True, **more)


def test_rounds_are_put_together_without_their_warm_up():
    merged = measure.merge([result("a", [1.0, 2.0]), result("a", [3.0])])
    assert merged.timed == [1.0, 2.0, 3.0]


def test_a_failed_round_is_dropped_while_another_has_not():
    failed = Result("a", "a", 2, error="broke")
    merged = measure.merge([failed, result("a", [3.0])])
    assert (merged.timed, merged.label) == ([3.0], "a (1 of 2 rounds failed)")
    assert measure.merge([result("a", [3.0])]).label == "a"
    assert measure.merge([failed, failed]).error == "broke"


def test_auto_is_timed_after_its_trial_and_its_loss_is_of_as_many_steps():
    jobs = []

    def run(job):
        jobs.append(job)
        return result(job.method, [1.0], losses=[float(step) for step in range(job.steps)])

    group = Suite(("ddp-fp32", "hipress:auto:optimizer=sgd"), steps=20, rounds=1)
    fp32, auto = measure.measure(group, run, lambda text: None)
    assert (jobs[0].steps, jobs[0].warmup) == (20, 4)
    assert (jobs[1].steps, jobs[1].warmup) == (20 + measure.TRIAL, measure.TRIAL)
    assert auto.losses == fp32.losses


def test_slow_links_have_more_time_for_a_step():
    jobs = []
    for rate in ("none", "10mbit"):
        suite = Suite(("none",), hosts=8, rate=rate, rounds=1)
        measure.measure(suite, lambda job: jobs.append(job) or result("none", [1.0]), print)
    first = 7 * 32 * jobs[1].workload.parameters / 1e7  # seconds in which rank 0 gives its weights
    assert jobs[0].timeout < first < jobs[1].timeout


def tried(plan, predicted, measured):
    return {"plan": plan, "predicted_seconds": predicted, "step_seconds": measured, "verdict": "-"}


def test_predictions_are_shown_beside_what_was_measured():
    plans = [tried("a", 1.1, 1.0), tried("b", 0.5, 1.0), tried("c", 1.0, None)]
    first = result("hipress:auto", [1.0], tried=plans[:1])
    merged = measure.merge([first, result("hipress:auto", [1.0], tried=plans[1:])])
    assert merged.tried == plans
    *table, _, last = measure.predictions([merged])
    assert len(table) == 5
    assert "| a | 1100 | 1000 | +10% |" in table[3]
    assert last == "Predictions are off by 30% in the median, at most 50%."
    assert measure.predictions([result("none", [1.0])]) == []


def test_figures_and_table_are_written(tmp_path):
    results = [result("ddp-fp32", [1.0]), result("hipress:auto", [1.0])]
    report = Report("loopback", 2, "none", 2, Workload(), results, "python -m bench.training")
    training.write("loopback", report, tmp_path)
    assert "| ddp-fp32 | 1000 |" in (tmp_path / "loopback.md").read_text()
    assert Results.read(tmp_path / "loopback.json").reports == [report]


@pytest.mark.parametrize(
    "text, near",
    [("hipress:onebit_grup", "hipress:onebit_group"), ("terngrd", "hipress:terngrad")],
)
def test_an_unknown_method_is_told_before_any_runs(text, near, monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(training, "_measure_and_write", lambda *given: ran.append(given))
    with pytest.raises(typer.Exit) as exit:
        training.main(["loopback"], f"none,{text}", output=tmp_path)
    assert exit.value.exit_code == 2
    assert not ran
    told = capsys.readouterr().err
    assert f"unknown method {text!r}" in told
    assert f"did you mean {near}?" in told
    training.main(["loopback"], "none, ddp-fp32", output=tmp_path)
    assert ran[0][1].methods == ("none", "ddp-fp32")


def test_checkouts_take_turns_in_which_begins(monkeypatch, tmp_path):
    begun = []

    def times(name, method, group, root):
        begun.append(root == tmp_path)
        return [2.0, 2.0, 9.0] if begun[-1] else [1.0]

    monkeypatch.setattr(training, "times", times)
    (line,) = training.compare("hosts2", Suite(("none",), rounds=2), tmp_path)
    assert begun == [True, False, False, True]
    assert "none: 1000.0 ms a step, 2000.0 in" in line
    assert "ratio 0.500, 0.500 to 0.500 by round" in line


@pytest.mark.parametrize("alone", [True, False])
def test_times_of_another_checkout_are_read_in_both_formats(alone, monkeypatch, tmp_path):
    def run(program, **how):
        folder = Path(program[program.index("--output") + 1])
        one = {"results": [{"error": None, "seconds": [1.0, 2.0]}]}
        (folder / "hosts2.json").write_text(json.dumps(one if alone else {"reports": [one]}))

    monkeypatch.setattr(training.subprocess, "run", run)
    assert training.times("hosts2", "none", Suite(("none",)), tmp_path) == [1.0, 2.0]


def test_a_folder_that_cannot_be_is_told_before_any_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(training, "_measure_and_write", None)
    (tmp_path / "file").touch()
    with pytest.raises(typer.Exit):
        training.main(["loopback"], output=tmp_path / "file" / "folder")
    assert "Not a directory" in capsys.readouterr().err


def test_links_of_another_rate(monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(training, "_measure_and_write", lambda *given: ran.append(given))
    training.main(["hosts2", "slow"], rate="560mbit", output=tmp_path)
    assert [given[1].rate for given in ran] == ["560mbit", "560mbit"]
    with pytest.raises(typer.Exit):
        training.main(["hosts2"], rate="fast", output=tmp_path)
    assert "fast" in capsys.readouterr().err
    assert len(ran) == 2


def test_another_optimizer(monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(training, "_measure_and_write", lambda *given: ran.append(given))
    training.main(["hosts2"], optimizer="adamw", output=tmp_path)
    assert ran[0][1].workload == Workload(optimizer="adamw")
    with pytest.raises(typer.Exit):
        training.main(["hosts2"], optimizer="rmsprop", output=tmp_path)
    assert "optimizer 'rmsprop': the workload trains with sgd or adamw" in capsys.readouterr().err


def test_the_picture_shows_the_step_times_of_the_table():
    drawn = {row.result.method: row for row in rows(picture.recorded().results)}
    (report,) = Results.read(RESULTS / "hosts2.json").reports
    timed = {row.result.method: row for row in rows(report.results)}
    assert list(drawn) == list(methods.DEFAULTS)
    for name, row in drawn.items():
        assert row.median == timed[name].median
        assert name in methods.ALONE or len(row.result.seconds) == len(row.result.losses) == 200
