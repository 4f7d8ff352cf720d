"""`hipress probe` and `hipress plan`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from casync.predict.cost import CodecCost, Costs, Line, Transfer
from casync.topology import Topology
from hipress import options
from hipress.cli import app
from hipress.errors import ConfigError
from hipress.plan import profile
from hipress.plan.auto import candidates
from tests.hipress.fakes import Int8

CODECS = {"int8_fake": Int8()}
WIRE = Transfer(Line(1e-4, 1e-8), 0.25)
NODES = Topology.of([[0, 1], [2, 3]])


def costs(codecs):
    work = CodecCost(Line(1e-6, 1e-10), Line(1e-6, 2e-10), Line(2e-6, 3e-10))
    return Costs({1: WIRE, 3: WIRE}, {"float32": WIRE, "bfloat16": WIRE, "float16": WIRE},
                 dict.fromkeys(codecs, work), Transfer(Line(1e-5, 1e-10)), 0.5)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    """A profile of what auto may choose."""
    codecs = candidates(options.make("auto"))
    profile.write(tmp_path / "profile.json", costs(codecs), Topology.flat(2), codecs)
    return tmp_path / "profile.json"


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile.write(tmp_path / "p.json", costs(CODECS), NODES, CODECS)
    read = profile.read(tmp_path / "p.json")
    assert (read.costs, read.topology) == (costs(CODECS), NODES)
    assert read.differences(CODECS) == []


def test_what_differs_from_a_profile_is_told(tmp_path):
    profile.write(tmp_path / "p.json", costs(CODECS), NODES, CODECS)
    changed(tmp_path / "p.json", versions={**profile.versions(), "torch": "1.0"})
    read = profile.read(tmp_path / "p.json")
    others = {"int8_fake": replace(Int8(), digest="other"), "new": Int8()}
    told = read.differences(others)
    assert told[0].startswith("torch '1.0' there, ")
    assert told[1:] == [
        "codec 'new' is not in it",
        "codec 'int8_fake' has another text or other parameters",
    ]


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "is no profile of `hipress probe`: JSONDecodeError"),
        ("[]", "is no profile"),
        ('{"format": 7}', "format 7; this reads 2"),
        ('{"format": 2}', "is no profile of `hipress probe`: KeyError: 'nodes'"),
        ('{"format": 2, "nodes": [[0, 5]]}', "is no profile .*: PlanError"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, text, told):
    if text is not None:
        (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=told):
        profile.read(tmp_path / "p.json")


def test_a_negative_time_is_refused(path):
    data = json.loads(path.read_text())["costs"]
    wrong = {"line": {"latency": -1, "per_byte": 0}, "cores": 0}
    for values, told in (
        ({"exchange": {"1": wrong}}, "a negative time"),
        ({"exchange": {}}, "no exchange was measured"),
        ({"overlap": -0.5}, "-0.5 is negative"),
    ):
        changed(path, costs={**data, **values})
        with pytest.raises(ConfigError, match=told):
            profile.read(path)


def test_the_plan_of_shapes(path):
    result = plan("1000x500,500", "--profile", path)
    assert result.exit_code == 0, result.output
    assert "Tried, in this order" in result.output
    assert "no compression" in result.output
    row = next(line for line in result.output.splitlines() if "0 1000x500" in line)
    assert "gains time" in row
    assert row.count("(") == 2  # the choice, and what else there is
    longer = plan("1000x500,500", "--profile", path, "--step", "1000")
    assert re.search(r"1\d\d\d\.\d\d", longer.output)


def test_the_plan_of_a_model(path):
    result = plan("tests.hipress.common:make", "--profile", path)
    assert result.exit_code == 0, result.output
    assert "second.weight 301x131" in result.output


def test_a_profile_of_another_version_is_flagged(path):
    changed(path, versions={**profile.versions(), "hipress": "0.0"})
    result = plan("1000x500", "--profile", path)
    assert result.exit_code == 0
    assert "warning" in result.output
    assert "hipress '0.0' there" in result.output


@pytest.mark.parametrize(
    "model, told",
    [
        ("tests.hipress.nowhere:make", "makes no model: ModuleNotFoundError"),
        ("tests.hipress.common:nothing", "makes no model: AttributeError"),
        ("tests.hipress.common:data", "makes no model: TypeError"),
        ("builtins:dict", "makes a dict, not a torch.nn.Module"),
        ("3x", "shapes such as 10000x512,512"),
        ("-3x5", "shapes such as 10000x512,512"),
    ],
)
def test_models_that_are_none(path, model, told):
    result = plan("--profile", path, "--", model)
    assert result.exit_code == 2
    assert told in result.output


def test_an_optimizer_that_is_none(path):
    result = plan("3x5", "--profile", path, "--optimizer", "sdg")
    assert result.exit_code == 2
    assert "did you mean 'sgd'" in result.output


def test_probe_needs_ranks():
    result = CliRunner().invoke(app, ["probe"])
    assert result.exit_code == 2
    assert "torchrun --nproc-per-node 2" in result.output


@pytest.mark.slow
def test_probe_under_torchrun(tmp_path):
    output = tmp_path / "profile.json"
    root = Path(__file__).parents[2]
    program = [sys.executable, "-c", "from hipress.cli import main; main()"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python",
         *program, "probe", "--output", str(output)],
        cwd=tmp_path, check=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    read = profile.read(output)
    assert read.topology == Topology.of([[0, 1]])
    assert read.differences(candidates(options.make("auto"))) == []
    assert read.costs.to(1).line.per_byte > 0
    assert 0 <= read.costs.overlap <= 1
    assert all(each.hop.per_byte > 0 for each in read.costs.codecs.values())
