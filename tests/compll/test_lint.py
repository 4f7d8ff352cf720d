"""Warnings for specs that compile, but are probably mistakes."""

import re

import pytest
from typer.testing import CliRunner

from compll.runtime import library
from compll.tools.cli import app


@pytest.fixture(autouse=True)
def _names_alone(monkeypatch):
    """PLAIN is no compressor, which test_training.py would tell."""
    monkeypatch.setattr("compll.runtime.training.trains", lambda codec: iter(()))


PLAIN = {
    "params": "{tau: 0.5}",
    "encode": "{q: abs(g) > tau}",
    "payload": '{q: "uint1[n]"}',
    "decode": "q",
}


def spec(tmp_path, **sections):
    """The file of PLAIN with some sections replaced."""
    path = tmp_path / "own.yaml"
    path.write_text("\n".join(f"{k}: {v}" for k, v in ({"name": "own"} | PLAIN | sections).items()))
    return path


def warnings(path):
    return [str(w).partition(":")[2] for w in library.warnings(path, {})]


WARNED = {
    "encode": ({"encode": "{q: abs(g) > tau, a: g + 1}"}, "3:27", "nothing uses 'a'"),
    "decode": ({"decode": "{a: q + 1, out: q}"}, "5:10", "nothing uses 'a'"),
    "param": ({"params": "{tau: 0.5, a: 1}"}, "2:23", "nothing uses parameter 'a'"),
    "hidden": ({"decode": "{tau: 2, q: q * tau}", "encode": "{q: g > 1}"}, "2:15", "'tau'"),
    "field": (
        {"payload": '{q: "uint1[n]", tau: float32}'},
        "4:31",
        "decode does not use payload field 'tau'",
    ),
    "state": (
        {"state": '{s: "float32[n]"}', "update": "{s: s + g}"},
        "6:13",
        "state 's' changes nothing that is sent",
    ),
}


@pytest.mark.parametrize("sections, place, words", WARNED.values(), ids=WARNED)
def test_unused(sections, place, words, tmp_path):
    (told,) = warnings(spec(tmp_path, **sections))
    assert told.startswith(f"{place}: warning: ")
    assert words in told
    assert "hint: " in told


def test_names_used_only_by_unused_names_are_unused(tmp_path):
    told = warnings(spec(tmp_path, encode="{q: abs(g) > tau, a: g + 1, b: a * tau}"))
    assert [line.split("'")[1] for line in told] == ["a", "b"]


USED = {
    "a branch that is not taken": {"encode": "{a: g + 1, q: abs(g) > tau if tau > 0 else a > 0}"},
    "a length": {"params": "{k: 3}", "encode": "{q: 'matrix(g, k)'}", "decode": "flat(q)"}
    | {"payload": '{q: "float32[ceil(n / k), k]"}'},
    "when": {"params": "{tau: 0.5, most: 9}", "when": "n > most"},
    "a condition": {"params": "{tau: 0.5, e: true}", "feedback": "error if e else none"},
    "an update": {
        "encode": "{m: s + g, q: m > tau, a: abs(m)}",
        "state": '{s: "float32[n]"}',
        "update": "{s: m - a}",
    },
    "a state by way of another": {
        "encode": "{q: s + g > tau}",
        "state": '{s: "float32[n]", t: "float32[n]"}',
        "update": "{s: t, t: g}",
    },
    "a field of a round": {
        "encode": "{top: max(abs(g)), q: 'g / max(combined(top), 1e-30) + tau'}",
        "payload": '{top: float32, q: "float32[n]"}',
        "rounds": "{top: max, q: mean}",
    },
}


@pytest.mark.parametrize("sections", USED.values(), ids=USED)
def test_used(sections, tmp_path):
    assert warnings(spec(tmp_path, **sections)) == []


@pytest.mark.parametrize("value", ["sign(g)", "-g", "round(g / max(abs(g)) * 127)", "2 * g",
                                   "where(g > 0, 1, -1)"])  # fmt: skip
@pytest.mark.parametrize("base", ["uint8", "uint1", "trit", "huffman[2]", "uint16", "uint32"])
def test_negative_values_in_unsigned_fields(value, base, tmp_path):
    sections = {"params": "{}", "encode": f"{{q: '{value}'}}", "payload": f'{{q: "{base}[n]"}}'}
    (told,) = warnings(spec(tmp_path, **sections))
    assert told.startswith(f"4:15: warning: 'q' can be negative, which {base[:7]} holds as 0\n")


NEVER = [
    *("g * g", "abs(g)", "sign(g) + 1", "max(g, 0)", "g * sign(g)", "g / sign(g)", "-min(g, 0)"),
    *("where(g > 0, g, 0)", "g - min(g)", "where(g > 0, 2, -0)"),
]


@pytest.mark.parametrize("value", NEVER)
def test_values_not_plainly_negative(value, tmp_path):
    sections = {"params": "{}", "encode": f"{{q: '{value}'}}", "payload": '{q: "uint8[n]"}'}
    assert warnings(spec(tmp_path, **sections)) == []


def test_the_gradient_itself_in_an_unsigned_field(tmp_path):
    sections = {"params": "{}", "encode": "{}", "payload": '{g: "uint8[n]"}', "decode": "g"}
    (told,) = warnings(spec(tmp_path, **sections))
    assert "'g' can be negative" in told


@pytest.mark.parametrize("command", ["check", "build"])
def test_commands_tell_warnings(command, tmp_path):
    path = spec(tmp_path, params="{tau: 0.5, a: 1}")
    out = [] if command == "check" else ["-o", str(tmp_path / "out"), "--target", "reference"]
    result = CliRunner().invoke(app, [command, str(path), *out])
    assert result.exit_code == 0
    assert "own.yaml:2:23: warning: nothing uses parameter 'a'\n    hint: " in result.stderr
    assert "warning:" not in result.stdout
    strict = CliRunner().invoke(app, [command, str(path), "--strict", *out])
    assert (strict.exit_code, strict.stderr) == (1, result.stderr)
    fine = CliRunner().invoke(app, [command, str(spec(tmp_path)), "--strict", *out])
    assert (fine.exit_code, fine.stderr.strip()) == (0, "")


ROTATED = """name: rotated
encode:
  y: hadamard(g, 64)
  top: max(abs(y))
  q: floor((y / top + 1) * 7.5 + 0.5)
  negative: g < 0
payload: {top: float32, q: "uint4[n]"}
decode: hadamard((q / 7.5 - 1) * top, 64)
unbiased: true
feedback: error
"""


def test_slow_specs_are_told_at_their_cause(tmp_path):
    """A spec of nine walks once had "no problems"."""
    path = tmp_path / "own.yaml"
    path.write_text(ROTATED)
    told = [w for w in warnings(path) if "array at a time" in w]
    assert len(told) == 1
    assert told[0].startswith("3:3: warning: with hadamard this")
    path.write_text(
        ROTATED.replace("hadamard(g, 64)", "g").replace("hadamard((q", "((q").replace(", 64)", ")")
    )
    assert not [w for w in warnings(path) if "array at a time" in w]


@pytest.mark.slow
def test_matrices_too_large_for_a_large_tensor_are_slow_not_wrong(tmp_path):
    """`check` once ended in an error without a place, though small tensors are fine."""
    encode = "{m: 'matrix(g, 8)', q: m @ transpose(m) @ m}"
    own = spec(tmp_path, params="{}", encode=encode, payload="{q: 'float32[ceil(n / 8), 8]'}",
               decode="flat(q)")  # fmt: skip
    (told,) = warnings(own)
    assert "computed an array at a time" in told
    result = CliRunner().invoke(app, ["build", str(own), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0


@pytest.mark.parametrize(
    "value, told", [("floor(abs(g))", True), ("floor(abs(g) + random(0, 1))", False)]
)
def test_rounding_without_draws_is_not_unbiased(value, told, tmp_path):
    own = spec(
        tmp_path, params="{}", encode=f"{{q: '{value}'}}", payload='{q: "uint4[n]"}',
        unbiased="true",
    )  # fmt: skip
    found = [w for w in warnings(own) if "nothing is drawn" in w]
    assert bool(found) == told
    if told:
        assert "cannot hold: nothing is drawn" in found[0]


def test_lossless_specs_are_unbiased(tmp_path):
    own = spec(tmp_path, params="{}", encode="{q: g}", payload='{q: "float32[n]"}', unbiased="true")
    assert warnings(own) == []


@pytest.mark.parametrize(
    "sections, told",
    [
        (
            {"encode": "{q: g / max(abs(g))}"},
            "3:10: warning: a gradient of zeros, as of unused words, decodes .*: 'q' .* 0 / 0 is",
        ),
        (
            {"encode": "{q: log(g)}"},
            "3:10: warning: an ordinary gradient decodes to NaN or infinity: 'q' .* log",
        ),
        (
            {"encode": "{a: exp(100 * abs(g)), q: a * g}"},
            "3:10: warning: an ordinary .* infinity: 'a' .* exp.* is beyond what a float32 holds",
        ),
        (
            {"encode": "{q: 1e6 * g}", "payload": "{q: 'float16[n]'}", "decode": "q / 1e6"},
            "4:15: warning: an ordinary .*: 'q' is up to [^ ]*e.06, and float16 .* scale it down",
        ),
        ({"encode": "{q: g}", "decode": "sqrt(q)"}, "5:1: warning: an ordinary .* sqrt"),
        ({"encode": "{q: 'where(g == 0, 0, g / max(abs(g)))'}"}, ""),
        ({"encode": "{q: log(g)}", "when": "n > 10000"}, ""),
    ],
)
def test_specs_that_decode_to_nan(sections, told, tmp_path):
    """The linter once reported "no problems" here: a batch with an unused word made weights NaN."""
    plain = {"params": "{}", "payload": '{q: "float32[n]"}'}
    found = warnings(spec(tmp_path, **plain | sections))
    assert len(found) == bool(told)
    if told:
        assert re.match(told, found[0], re.DOTALL), found[0]
        assert "hint: " in found[0]
