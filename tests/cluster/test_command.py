"""`hipress bench` on ranks that a scheduler started, and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hipress.tools.cli import app
from hipress.tools.results import Results
from tests.cluster.test_results import a_report, a_result

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
BENCH = (sys.executable, "-m", "hipress.tools.cli", "bench")
FEW = ("--steps", "2", "--rounds", "1", "--methods", "none,hipress:int4_group", "--output")


@pytest.mark.parametrize(
    "options, told",
    [
        (["--methods", "int4"], "unknown method 'int4'"),
        (["--methods", ""], "expected different methods"),
        (["--rate", "fast"], "fast"),
        (["--rate", "10"], "10"),
        (["--optimizer", "adamm"], "unknown optimizer 'adamm'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--output", "/dev/null/here"], "Not a directory"),
        (["--model", "no_such_module:make"], "no_such_module"),
        (["--model", "gpt"], "lstm, or package.module:function"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(options, told, monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 2
    assert told in done.output


def test_compare_prints_what_changed(tmp_path):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    Results([a_report(a_result("ddp-fp32", 0.2))]).write(before)
    Results([a_report(a_result("ddp-fp32", 0.3))], version="0.0.1").write(after)
    done = CliRunner().invoke(app, ["bench", "compare", str(before), str(after)])
    assert done.exit_code == 0
    assert "+50.0%" in done.output
    assert "hipress: " in done.output  # of two versions
    assert "0.0.1 after" in done.output


def test_compare_of_results_without_a_common_method(tmp_path):
    for name, method in (("a", "ddp-fp32"), ("b", "none")):
        Results([a_report(a_result(method))]).write(tmp_path / name)
    done = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 1
    assert "no method was measured alike in both" in done.output


OWN = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 1))

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).square().mean()

    return Loss(), lambda rank, step: torch.randn(8, 64)
"""


def run(command, folder):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=560)


@pytest.mark.slow
def test_a_model_of_ones_own_on_loopback(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    run([*BENCH, "--loopback", "--model", "own:make", *FEW, "."], tmp_path)
    data = json.loads((tmp_path / "bench.json").read_text())
    ((none, ours),) = [report["results"] for report in data["reports"]]
    assert (none["error"], ours["error"]) == (None, None)
    assert ours["parameters"] == 64 * 256 + 256 + 256 + 1
    assert ours["identical"] is True
    assert ours["phases"]["encode_seconds"] > 0
    assert data["profile"]["places"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["ray", "submitit"])
def test_ranks_that_others_start(launcher, tmp_path):
    pytest.importorskip(launcher)
    (tmp_path / "own.py").write_text(OWN)  # small: Ray alone takes 20 seconds of a core
    program = [sys.executable, str(LAUNCH / f"{launcher}_bench.py")]
    run([*program, "--model", "own:make", *FEW, str(tmp_path)], tmp_path)
    (report,) = Results.read(tmp_path / "bench.json").reports
    assert report.place.startswith("2 real ranks on 1 host")
    assert [each.error for each in report.results] == [None, None]
    assert report.results[1].identical is True
    assert "<svg" in (tmp_path / "bench.html").read_text()


def commands(value):
    """Every command line of `hipress` in a job file."""
    match value:
        case dict():
            return [found for each in value.values() for found in commands(each)]
        case list():
            return [found for each in value for found in commands(each)]
    text = str(value)
    return [text[text.index("hipress bench") :].split()[1:]] if "hipress bench" in text else []


@pytest.mark.parametrize("file", ["skypilot.yaml", "kubeflow.yaml", "bench.sbatch"])
def test_job_files_call_the_command_as_it_is(file):
    text = (LAUNCH / file).read_text()
    if file == "bench.sbatch":
        given = commands(text)
    else:
        job = yaml.safe_load(text)
        trainer = job.get("spec", {}).get("trainer")
        given = commands(" ".join([*trainer["command"], *trainer["args"]]) if trainer else job)
    (line,) = given
    assert line[0] == "bench"
    told = CliRunner().invoke(app, [*line, "--rounds", "0"])  # too few: all others are read first
    assert "Invalid value for '--rounds'" in told.output
