"""Mistakes of a user, reported in one clear error before any work is done."""

import os

import numpy as np
import pytest
from typer.testing import CliRunner

import compll
from compll.runtime.library import ALIASES, backends
from compll.tools.cli import app
from tests.compll.wrong import problems, refuses

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


@pytest.mark.parametrize("made", ["matrix(g, columns)", "random_matrix(columns, 2)"])
def test_matrices_without_columns(made, tmp_path):
    """A parameter that the shape decides has its default if there is no shape, also in `check`."""
    path = tmp_path / "wide.yaml"
    path.write_text(
        "name: wide\nparams: {columns: {default: 0, from: columns}}\n"
        f"encode: {{m: '{made}', s: sum(m)}}\npayload: {{s: float32}}\ndecode: s\n"
    )
    result = run("check", path)
    assert result.exit_code == 1
    assert "3:14: a matrix has at least one row and column, not 0" in result.output
    assert "columns if columns > 0" in result.output


@pytest.mark.parametrize("kept", ["top(abs(g), ratio)", "filter(g > 0, 0.5)", "drawn(ratio)"])
def test_a_share_is_no_number_of_elements(kept, tmp_path):
    """top(x, 0.01) once silently kept no elements."""
    path = tmp_path / "share.yaml"
    text = (
        f"name: share\nparams: {{ratio: 0.01}}\nencode:\n  kept: {kept}\n  index: indices(kept)\n"
        "  value: g[kept]\npayload:\n  index: uint32[kept]\n  value: float32[kept]\n"
        "decode: scatter(index, value)\n"
    )
    path.write_text(text)
    result = run("check", path)
    assert result.exit_code == 1
    assert "4:9: " in result.output
    assert "takes a number of elements, not 0." in result.output
    assert "max(1, floor(n * ratio))" in result.output
    path.write_text(text.replace(", ratio)", ", n * ratio)").replace("(ratio)", "(n * ratio)"))
    assert ("number of elements" in run("check", path).output) == ("0.5" in kept)


def test_codes_of_a_matrix(tmp_path):
    """Codes by element or as a matrix; in payloads that ranks add, by element only."""
    path = tmp_path / "rows.yaml"
    text = "name: rows\nencode:\n  m: matrix(g, 8)\n  q: m < 0\npayload:\n  q: {}\ndecode: {}\n"
    path.write_text(text.format("uint1[n]", "where(q, -1, 1)"))
    output = run("check", path).output
    assert "6:6: 'q' is declared no matrix" in output
    assert "flat(m)" in output
    path.write_text(text.format("uint1[ceil(n / 8), 8]", "flat(where(q, -1, 1))"))
    assert run("check", path).exit_code == 0
    path.write_text(path.read_text() + "rounds: {q: mean}\n")
    output = run("check", path).output
    assert "6:6: 'q': a matrix is float32, float16, bfloat16 where ranks add, not uint1" in output
    assert "flat(m)" in output
    path.write_text(text.format("uint16[ceil(n / 8), 8]", "flat(where(q, -1, 1))"))
    assert "float8_e4m3 or uint of 1 to 15 bits, not uint16" in run("check", path).output


def test_a_number_of_elements_that_varies_with_the_step(tmp_path):
    path = tmp_path / "warm.yaml"
    text = (
        "name: warm\nencode:\n  kept: KEPT\n  index: indices(kept)\n  value: g[kept]\npayload:\n"
        "  index: gaps[kept]\n  value: float32[kept]\ndecode: scatter(index, value)\n"
    )
    path.write_text(text.replace("KEPT", "top(abs(g), 9 + step)"))
    assert "filter(x >= kth_largest(x, k), bound)" in run("check", path).output
    kept = "filter(abs(g) >= kth_largest(abs(g), min(9 + step, 99)), 99)"
    path.write_text(text.replace("KEPT", kept))
    codec = compll.compile(path, "reference")
    x = np.arange(1000, dtype=np.float32)
    for step, count in ((0, 9), (5, 14), (500, 99)):
        payload = codec.encode(x, step=step)
        assert np.count_nonzero(codec.decode(payload, 1000)) == count


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
        (
            "default: 2, choices: [1, 2, x]",
            ["3:38: this choice can never be given: parameter 'bits' is int, not 'x'"],
        ),
        ("default: 2, choices: [1, 2, 4], max: 2", ["3:38: this choice can never be given"]),
        ("type: int, default: " + "9" * 20, ["'bits' is an int below 2**53, not a number of 67"]),
    ],
)
def test_limits_of_parameters(param, words, tmp_path):
    found = problems(SPEC.replace("PARAM", param), tmp_path)
    text = "\n".join(map(str, found))
    assert all(w in text for w in words), text
    assert len(found) == len(words)


@pytest.mark.parametrize("option, name", [("--plot", "x.foo"), ("--json", "none/x.json")])
def test_bench_refuses_files_before_it_measures(option, name, tmp_path, monkeypatch):
    monkeypatch.setattr("compll.tools.measure.measure", lambda *_: pytest.fail("measured"))
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


def test_ways_to_combine_are_told_with_all_other_mistakes(tmp_path):
    path = tmp_path / "example.yaml"
    good = "name: example\nencode: {q: g * 1}\npayload: {q: 'float32[n]'}\ndecode: q\n"
    path.write_text(good + "rounds: {q: mean}\n")
    assert compll.compile(path).rounds[0].how == "mean"
    path.write_text(good.replace("g * 1", "h * 1") + "rounds: {q: avg}\n")
    with pytest.raises(compll.SpecError) as error:
        compll.compile(path)
    told = [(d.span.line, d.message, d.hint) for d in error.value.diagnostics]
    assert [line for line, *_ in told] == [2, 5]
    assert told[1][1:] == ("ranks combine by mean, max", "q: mean")


@pytest.mark.parametrize(
    "spec, given, same",
    [
        ("topk", {"ratio": np.float32(0.125)}, {"ratio": 0.125}),
        ("topk", {"ratio": np.float64(0.1)}, {"ratio": 0.1}),
        ("topk", {"ratio": np.longdouble(0.5)}, {"ratio": 0.5}),
        ("topk", {"ratio": np.int64(1)}, {"ratio": 1}),
        ("thc", {"bits": np.uint8(2), "residual": np.bool_(False)}, {"bits": 2, "residual": False}),
    ],
)
def test_scalars_of_numpy_are_parameters(spec, given, same):
    codec = compll.compile(spec, "reference", **given)
    assert codec is compll.compile(spec, "reference", **same)
    assert all(type(value) in (int, float, bool, str) for value in codec.params.values())


@pytest.mark.parametrize(
    "spec, given, message",
    [
        ("thc", {"bits": np.float32(2)}, "parameter 'bits' is int, not 2.0"),
        ("thc", {"bits": np.bool_(True)}, "parameter 'bits' is int, not True"),
        ("thc", {"residual": np.int64(1)}, "parameter 'residual' is bool, not 1"),
        ("topk", {"ratio": np.complex64(1)}, "parameter 'ratio' is float, not (1+0j)"),
        ("topk", {"ratio": np.ones(1)}, "parameter 'ratio' is float, not array"),
        ("topk", {"ratio": np.float32("nan")}, "parameter 'ratio' is from 0 to 1, not nan"),
        ("topk", {"ratio": 10**5000}, "is from 0 to 1, not a number of 16610 bits"),
        ("dgc", {"warmup": 10**400}, "'warmup' is an int below 2**53, not a number of 1329 bits"),
        ("dgc", {"workers": 10**5000}, "'workers' is an int below 2**53, not a number of 16610"),
        ("dgc", {"workers": 2**63}, "'workers' is an int below 2**53, not 9223372036854775808"),
    ],
)
def test_scalars_of_the_wrong_kind_are_refused(spec, given, message):
    with pytest.raises(compll.SpecError) as error:
        compll.compile(spec, "reference", **given)
    assert message in str(error.value)
    assert ".yaml" not in str(error.value)  # the mistake is in the call


STATED = """name: example
state: {{m: "float32[n]"}}
encode: {encode}
payload: {payload}
decode: q
update: {update}
"""
RIGHT = {"encode": "{q: g * 1}", "payload": "{q: 'float32[n]'}", "update": "{m: g}"}
QUOTE = "quote the expression, or write it on its own line"


def told(folder, **wrong):
    """Diagnostics of a spec with these sections."""
    found = problems(STATED.format(**RIGHT | wrong), folder)
    return [(d.span.line, d.span.col, d.message, d.hint) for d in found]


@pytest.mark.parametrize(
    "wrong, place",
    [
        ({"update": "{m: where(g > 0, 0, g)}"}, (6, 13)),
        ({"update": "{ m: where(g > 0, max(m,\n  0), g) }"}, (6, 14)),
        ({"encode": "{k: g, q: min(k, 0)}"}, (3, 19)),
        ({"encode": "{q: where(g > 0, g, 0) * 2, k: g, l: max(g, 1) }"}, (3, 13)),
        ({"update": "{m: max(g, k: 3}"}, (6, 13)),
    ],
)
def test_a_comma_in_braces_is_one_mistake(wrong, place, tmp_path):
    found = told(tmp_path, **wrong)
    assert found == [(*place, "malformed YAML: in braces a comma ends an entry", QUOTE)]


@pytest.mark.parametrize(
    "wrong, quoted",
    [
        ({"payload": "{q: float32[n]}"}, "float32[n]"),
        ({"payload": "{s: float32, q: uint[2][n]}"}, "uint[2][n]"),
        ({"update": "{m: g + g[kept]}"}, "g + g[kept]"),
    ],
)
def test_brackets_in_braces_are_quoted(wrong, quoted, tmp_path):
    (found,) = told(tmp_path, **wrong)
    assert found[3] == f'in braces, a text that holds a [ is quoted: "{quoted}"'


def test_a_default_in_short_is_checked(tmp_path):
    text = SPEC.replace("{PARAM}", "9" * 20)
    refuses(text, r"3:9: the default is not allowed: .* below 2\*\*53", tmp_path)


@pytest.mark.parametrize("target", [None, 3, ["gpus"]])
def test_targets_that_are_no_names(target):
    with pytest.raises(compll.UsageError, match=r"no backend .*: (known here|did you)"):
        compll.compile("onebit", target)


@pytest.mark.parametrize("when", ["n", "1", "n / 2", "g > 0"])
def test_when_is_a_condition(when, tmp_path):
    (found,) = told(tmp_path, update=RIGHT["update"] + f"\nwhen: {when}")
    assert found == (7, 7, "`when:` is a condition of n and parameters", "like `n > 1000`")
