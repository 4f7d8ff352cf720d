"""Mistakes of a user, told in one clear error before any work is done."""

import os

import pytest
from typer.testing import CliRunner

import compll
from compll.cli import app
from compll.library import ALIASES, backends

SPEC = """name: example
params:
  bits: {PARAM}
encode: {q: g * 1}
payload: {q: 'float32[n]'}
decode: q
"""


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_helpers_of_backends_are_no_backends():
    assert backends() == ["cpu", "cuda", "reference"]
    result = run("build", "onebit", "--target", "shared")
    assert result.exit_code == 2
    assert "no backend 'shared': known here: cpu, cuda, reference" in result.output


def test_only_regular_files_are_read(tmp_path):
    loop, pipe = tmp_path / "loop.yaml", tmp_path / "pipe.yaml"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    for path, words in ((loop, "symbolic links"), (pipe, "no regular file")):
        result = run("check", path)
        assert result.exit_code == 1
        assert result.output.count("\n") == 1
        assert words in result.output


@pytest.mark.parametrize("payload", ["{}", "", "~"])
def test_a_payload_has_a_field(payload, tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text(f"name: empty\npayload: {payload}\ndecode: 0\n")
    result = run("check", path)
    assert result.exit_code == 1
    assert "empty.yaml:2:1: a payload has at least one field" in result.output


@pytest.mark.parametrize(
    "param, words",
    [
        ("default: 2, min: 3, max: 1", ["3:27: parameter 'bits': min 3 is above max 1"]),
        ("default: a, type: str, min: 3", ["3:33: 'min' is for numbers, parameter 'bits' is str"]),
        ("default: true, max: 1", ["'max' is for numbers, parameter 'bits' is bool"]),
        ("default: 2, type: num, choices: 5", ["unknown type 'num'", "'choices' is a list"]),
    ],
)
def test_limits_of_parameters(param, words, tmp_path):
    path = tmp_path / "example.yaml"
    path.write_text(SPEC.replace("PARAM", param))
    with pytest.raises(compll.SpecError) as error:
        compll.compile(path)
    assert all(w in str(error.value) for w in words), str(error.value)
    assert len(error.value.diagnostics) == len(words)


@pytest.mark.parametrize("option, name", [("--plot", "x.foo"), ("--json", "none/x.json")])
def test_bench_refuses_files_before_it_measures(option, name, tmp_path, monkeypatch):
    monkeypatch.setattr("compll.measure.measure", lambda *_: pytest.fail("measured"))
    result = run("bench", "onebit", option, tmp_path / name)
    assert result.exit_code == 2
    assert "cannot write" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, meant", [("3lc", "threelc"), ("1-bit-sgd", "onebit_sgd")])
def test_names_of_the_literature(name, meant):
    assert set(ALIASES.values()) <= set(compll.list_specs())
    assert f"did you mean '{meant}'?" in run("check", name).output


def test_a_parameter_is_given_once():
    result = run("check", "dgc", "-p", "ratio=.1", "-p", "ratio=.2")
    assert result.exit_code == 2
    assert "'ratio' is given twice" in result.output


def test_rounds_print_in_a_line():
    rounds = compll.compile("powersgd", "reference").rounds
    assert all(f"Round({r.name!r}" in str(rounds) for r in rounds)
    assert len(str(rounds)) < 200
