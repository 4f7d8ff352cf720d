"""`compll check` lets a spec take equal gradients in, as the tutorial's test does, and says which
part of it keeps it from training."""

import re

import numpy as np
import pytest
from typer.testing import CliRunner

import compll
from compll.runtime import training
from compll.runtime.library import warnings
from compll.tools import cli
from compll.tools.cli import app
from tests.tiers import first_fast

#: specs of which `check` tells that they are slow
SLOW = ("atomo", "sketch", "sparseloco", "thc")
LEVELS = """\
name: levels
group: 256
encode:
  s: max(abs(g))
  q: floor((g / max(s, 1e-30) + 1) * 7.5 + 0.5)
payload: {s: float32, q: "uint4[n]"}
decode: (q / 7.5 - 1) * s
feedback: error
"""
SIGNS = """\
name: signs
group: 256
state: {m: "float32[n]"}
encode:
  v: m + g
  s: mean(abs(v))
  q: v < 0
payload: {s: float32, q: "uint1[n]"}
decode: where(q, -s, s)
update:
  m: v - where(q, -s, s)
"""


def told(tmp_path, text):
    """The warnings of a spec."""
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return [f"{d.span.line}: {d.message}" for d in warnings(path, {})]


@pytest.mark.parametrize("text", [LEVELS, SIGNS])
def test_sound_specs(text, tmp_path):
    assert told(tmp_path, text) == []
    assert told(tmp_path, text.replace("feedback: error", "")) == []


#: a sound spec, a part of it, what stands there instead, and the warning
WRONG = {
    "codes above their type": (LEVELS, "uint4", "uint2", "6: .* 'q' is above 3, up to 15, for 95%"),
    "codes below zero": (LEVELS, " + 1) * 7.5", ") * 7.5", "6: .* 'q' is below 0 for 4.%"),
    "a sign inverted": (LEVELS, "(q / 7.5 - 1)", "(1 - q / 7.5)", "7: .* point away from them"),
    "three times as much": (LEVELS, "(q / 7.5", "3 * (q / 7.5", "8: .* 'residual' grows .* times"),
    "an offset": (
        LEVELS.replace("feedback: error\n", ""), "- 1)", "- 0.4)", "7: .* shifted: their mean",
    ),
    "a part that never travels": (
        LEVELS, "decode: (", "decode: where(q < 8, 0, 1) * (",
        "8: .* lost for good: 'residual' grows 2 times",
    ),
    "three times as much, without feedback": (
        LEVELS.replace("feedback: error\n", ""), "(q / 7.5", "3 * (q / 7.5", "7: .* to 3 times",
    ),
    "always zero": (LEVELS, "decode: ", "decode: 0 * ", "7: .* 20 equal gradients decode to zeros"),
    "other elements": (
        SIGNS.replace(" - where(q, -s, s)", ""), "q: v < 0", "q: random(0, 1) < 0.5",
        "9: .* hardly follow them",
    ),
    "a state that doubles": (
        SIGNS, "v - where(q, -s, s)", "2 * v", "11: .* state 'm' grows without bound: it grows",
    ),
    "a state that grows slowly": (
        SIGNS, "v - where(q, -s, s)", "1.04 * v", "11: .* state 'm' grows without bound: it grows",
    ),
    "a state that overflows": (
        SIGNS.replace(" - where(q, -s, s)", ""), "s: mean(abs(v))", "s: exp(3 * mean(abs(v)))",
        "9: .* decode to NaN or infinity in the end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("sound, part, instead, words", WRONG.values(), ids=WRONG)
def test_specs_that_cannot_train(sound, part, instead, words, tmp_path):
    assert sound.count(part) == 1
    text = sound.replace(part, instead)
    (warning,) = told(tmp_path, text)
    assert re.match(words, warning), warning


def test_check_strict_refuses_them(tmp_path):
    path = tmp_path / "levels.yaml"
    path.write_text(LEVELS.replace("uint4", "uint2"))
    result = CliRunner().invoke(app, ["check", "--strict", str(path)])
    assert (result.exit_code, result.stdout) == (1, "1 checked, 1 warning\n")
    assert "levels.yaml:6:" in result.stderr


@pytest.mark.slow
def test_only_slow_specs_of_the_package_have_warnings(monkeypatch):
    monkeypatch.setattr("compll.runtime.lint.DRAWS", 40)  # test_unbiased.py draws more
    monkeypatch.setattr(training, "trains", lambda codec: iter(()))  # that is the next test
    names = compll.list_specs()
    result = CliRunner().invoke(app, ["check", *names])
    assert result.exit_code == 0
    assert result.stdout == f"{len(names)} checked, {len(SLOW)} warnings\n"
    told = re.findall(r"(\w+)\.yaml:\d+:\d+: warning: (.*)\n    hint: (.*)", result.stderr)
    assert [name for name, _, _ in told] == [*SLOW]
    for _, warning, hint in told:
        assert "computed an array at a time" in warning
        assert "compll explain --traffic" in hint


@pytest.mark.parametrize("name", first_fast(dict.fromkeys(["onebit_group", *compll.list_specs()])))
def test_every_spec_of_the_package_trains(name):
    assert list(training.trains(compll.compile(name, "reference"))) == []


@pytest.mark.parametrize("kind", cli.kinds())
def test_new_specs_have_none(kind, tmp_path):
    assert warnings(cli.start("own", kind, tmp_path), {}) == []


def test_codes_of_an_empty_selection_are_in_range(tmp_path):
    """Their mean was one of nothing, with a warning of NumPy's."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: never\nencode:\n  kept: filter(abs(g) < 0)\n  place: indices(kept)\n"
        "  big: (g > 0)[kept]\n  size: mean(abs(g))\n"
        'payload: {size: float32, place: "gaps[kept]", big: "uint1[kept]"}\n'
        "decode: scatter(place, where(big, size, -size))\n"
    )
    codec = compll.compile(path, "reference")
    assert not list(training.clamped(codec, np.ones(100, np.float32)))
