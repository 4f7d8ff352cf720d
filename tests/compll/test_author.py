"""For authors of specs: `compll new` and the JSON Schema."""

import json

import jsonschema
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import compll
from compll.runtime.library import specs_dir
from compll.tools import cli
from compll.tools.cli import app
from compll.tools.schema import schema
from tests.tiers import first_fast

VALIDATOR = jsonschema.Draft7Validator(schema())
RIGHT = """name: example
params: {bits: 2, ratio: {default: 1e-3, max: inf}}
encode:
  q: |
    where(g < 0, 1, 0)  # a remark (it calls nothing)
payload: {q: "uint[bits][n]"}
decode: {size: abs(q), out: size * 2}
"""


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def complaints(text):
    return [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("kind", first_fast(cli.kinds()))
def test_new_specs_compile_as_they_are(kind, tmp_path, rng):
    result = run("new", "mine", "--kind", kind, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    path = tmp_path / "mine.yaml"
    assert complaints(path.read_text()) == []
    codecs = [compll.compile(path, target) for target in ("reference", "cpu")]
    x = rng.standard_normal(5000).astype(np.float32)
    states = [codec.init_state(5000) for codec in codecs]
    payloads = [c.encode(x, state=s) for c, s in zip(codecs, states, strict=True)]
    assert np.array_equal(*payloads)
    assert len(payloads[0]) < x.nbytes / 4
    assert np.linalg.norm(x - codecs[0].decode(payloads[0], 5000)) < np.linalg.norm(x)


@pytest.mark.parametrize(
    "args, words",
    [
        (("1x",), "'1x' is no name"),
        (("my spec",), "is no name"),
        (("mine.yaml",), "is no name"),
        (("../mine",), "is no name"),
        (("onebit",), "comes with the package"),
        (("mine", "--kind", "quantiser"), "did you mean 'quantizer'?"),
        (("mine", "-o", "/proc/none"), "cannot write"),
    ],
)
def test_new_refuses(args, words, tmp_path):
    result = run("new", *(args if "-o" in args else (*args, "-o", tmp_path)))
    assert result.exit_code == 2
    assert words in result.output
    assert not list(tmp_path.iterdir())


def test_new_never_overwrites(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("something")
    result = run("new", "mine", "-o", tmp_path)
    assert result.exit_code == 2
    assert "mine.yaml exists" in result.output
    assert path.read_text() == "something"


def test_schema_is_printed():
    assert json.loads(run("schema").output) == schema()
    jsonschema.Draft7Validator.check_schema(schema())


@pytest.mark.parametrize("name", compll.list_specs())
def test_every_spec_fits_the_schema(name):
    assert complaints((specs_dir() / f"{name}.yaml").read_text()) == []


@pytest.mark.parametrize(
    "old, new",
    [
        ("", ""),
        ("q: |", "r: true\n  q: |"),
        ("bits: 2", "bits: {type: int, default: 2, choices: [1, 2], about: width}"),
        ("params: {bits: 2, ratio: {default: 1e-3, max: inf}}", "params:"),
        ("{size: abs(q), out: size * 2}", "(not (q and 1)) * abs(q) if (q > 1) else (2)"),
    ],
)
def test_right_specs_fit(old, new):
    assert complaints(RIGHT.replace(old, new)) == []


@pytest.mark.parametrize(
    "old, new",
    [
        ("name: example", "name: 1x"),
        ("name: example\n", ""),
        ("encode:", "encod:"),
        ("bits: 2", "bits: {type: integer, default: 2}"),
        ("bits: 2", "bits: {type: int}"),
        ("bits: 2", "bits: {default: 2, maximum: 3}"),
        ("bits: 2", "bits: [2]"),
        ("max: inf", "max: much"),
        ("where(", "were("),
        ("abs(q)", "[q]"),
        ("uint[bits][n]", "uint[bits]["),
        ("uint[bits][n]", "unit[bits][n]"),
        ("uint[bits][n]", "uint24[n]"),
        ('{q: "uint[bits][n]"}', "{}"),
        ("decode:", "feedback: yes\ndecode:"),
        ("decode:", "merge: add\ndecode:"),
        ("{size: abs(q), out: size * 2}", ""),
    ],
)
def test_wrong_specs_do_not_fit(old, new):
    assert old in RIGHT
    assert complaints(RIGHT.replace(old, new))
