"""Wrong specs: every problem at once, with its place and a hint; never a traceback."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compll
from compll.backends import cpu
from compll.library import locate

GOOD = """name: example
params:
  bits: {type: int, default: 2, choices: [1, 2, 4, 8]}
encode:
  scale: mean(abs(g))
  q: where(g < 0, 1, 0)
payload:
  scale: float32
  q: "uint[bits][n]"
decode: where(q == 1, -scale, scale)
feedback: error
"""


def problems(text, tmp_path, **params):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(compll.SpecError) as caught:
        compll.compile(path, "reference", **params)
    return caught.value.diagnostics


def test_the_example_is_right(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(GOOD)
    assert compll.compile(path, "reference").payload_bytes(8) == 6


@pytest.mark.parametrize(
    "old, new, line, col, message, hint",
    [
        ("mean(", "meen(", 5, 10, "unknown operator 'meen'", "'mean'"),
        ("abs(g)", "abs(h)", 5, 19, "unknown name 'h'", "g"),
        ("feedback", "feedbak", 11, 1, "unknown section 'feedbak'", "'feedback'"),
        ("-scale", "-scalle", 10, 24, "unknown name 'scalle'", "'scale'"),
        (
            "where(q == 1",
            "where(g < 0",
            10,
            15,
            "decode uses 'g', which the payload lacks",
            "payload",
        ),
        ("scale: float32", "scale: float33", 8, 10, "unknown type 'float33'", "'float32'"),
        ("scale: float32", "scael: float32", 8, 10, "encode does not define it", "'scale'"),
        ("mean(abs(g))", "mean(abs(g), 2)", 5, 10, "takes 1 arguments, not 2", ""),
        ("mean(abs(g))", "abs(g)", 8, 10, "is declared one number but is [n]", "[n]"),
        ("mean(abs(g))", "mean(3)", 5, 10, "one value already", ""),
        ("mean(abs(g))", "g.mean()", 5, 10, "only operators can be called", ""),
        ("mean(abs(g))", "sum([g])", 5, 14, "List is not part of the language", ""),
        ("mean(abs(g))", "sum(x for x in g)", 5, 13, "GeneratorExp is not part", ""),
        ("mean(abs(g))", "mean(abs(g)", 5, 14, "not an expression", ""),
        ("default: 2", "default: 3", 3, 30, "one of 1, 2, 4, 8", ""),
        ("type: int", "type: integer", 3, 9, "unknown type 'integer'", "'int'"),
        ("  q: where", "  scale: where", 6, 3, "'scale' appears twice", "line 5"),
        ("  q: where", "  bits: where", 6, 3, "'bits' is defined twice", ""),
        ("  q: where", "  n: where", 6, 3, "'n' already has a meaning", ""),
        ("where(q == 1, -scale, scale)", "random(0, 1)", 10, 9, "drawn in encode", "payload"),
        ("name: example", "name: 1x", 1, 7, "'1x' is not a name", ""),
        ("feedback: error", "merge: sum", 11, 1, "payloads add without decoding only", ""),
        ("feedback: error", "group: 100", 11, 8, "a group has 100 elements", "power of two"),
        ("params:", "  params:", 2, 9, "malformed YAML", "quote"),
    ],
)
def test_one_mistake(old, new, line, col, message, hint, tmp_path):
    assert GOOD.count(old) >= 1
    found = problems(GOOD.replace(old, new, 1), tmp_path)
    match = [d for d in found if message in d.message]
    assert match, [str(d) for d in found]
    assert (match[0].span.line, match[0].span.col) == (line, col), str(match[0])
    assert hint in match[0].hint


@pytest.mark.parametrize(
    "old, new", [("mean(", "meen("), ("abs(g)", "abs(h)"), ("scalle", "scale")]
)
def test_one_wrong_name_gives_one_error(old, new, tmp_path):
    text = GOOD if old in GOOD else GOOD.replace(new, old, 1)
    if old == "scalle":
        text, old, new = GOOD, "-scale", "-scalle"
    assert len(problems(text.replace(old, new, 1), tmp_path)) == 1


def test_all_problems_are_reported_together_and_in_order(tmp_path):
    text = GOOD.replace("mean(", "meen(").replace("g < 0", "gg < 0").replace("-scale", "-scalle")
    found = problems(text + "nonsense: 1\n", tmp_path)
    assert [d.span.line for d in found] == [5, 6, 10, 12]
    assert str(found[0]).startswith(f"{found[0].path}:5:10: unknown operator 'meen'\n    hint: ")


def test_feedback_that_cannot_be_derived(tmp_path):
    text = """name: no
encode:
  kept: top(abs(g), 3)
  i: indices(kept)
payload: {i: "int32[kept]"}
decode: scatter(i, i)
feedback: error
"""
    (found,) = problems(text, tmp_path)
    assert (found.span.line, found.span.col) == (7, 1)
    assert "cannot have error feedback" in found.message


def test_parameters(tmp_path):
    found = problems(GOOD, tmp_path, bits=3)
    assert "one of 1, 2, 4, 8" in found[0].message
    found = problems(GOOD, tmp_path, bit=2)
    assert "'bits'" in found[0].hint
    found = problems(GOOD, tmp_path, bits=True)
    assert "is int" in found[0].message


@pytest.mark.parametrize("name", ["onebitt", "nowhere/x.yaml", "."])
def test_no_such_spec(name):
    with pytest.raises(compll.SpecError):
        compll.compile(name)


def test_unknown_backend():
    with pytest.raises(compll.UsageError, match="cpu"):
        compll.compile("onebit", "gpu")


def try_compile(text, folder):
    path = folder / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        codec = compll.compile(path, "reference")
        cpu.Source(codec.module)
    except compll.SpecError:
        return
    with np.errstate(all="ignore"):
        payload = codec.encode(np.linspace(-1, 1, 100, dtype=np.float32))
        codec.decode(payload, 100)


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(st.text(max_size=200))
def test_arbitrary_text(tmp_path, text):
    try_compile(text, tmp_path)


SYMBOLS = "+ - * / // % ** < <= == != and or & | ^ << >> @"
INFIX = SYMBOLS.split()
EXPRESSIONS = st.recursive(
    st.sampled_from(
        ["g", "n", "scale", "bits", "0", "1", "2.5", "inf", "nan", "step", "q", "'x'", "True"]
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(compll.check.OPERATORS)), st.lists(inner, max_size=3)).map(
            lambda t: f"{t[0]}({', '.join(t[1])})"
        ),
        st.tuples(inner, st.sampled_from(INFIX), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]}[{t[1]}]"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
    ),
    max_leaves=8,
)


@FUZZ
@given(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS, st.sampled_from(["", "group: 64\n"]))
def test_arbitrary_expressions(tmp_path, scale, q, decode, more):
    text = GOOD.replace("mean(abs(g))", scale).replace("where(g < 0, 1, 0)", q)
    try_compile(text.replace("where(q == 1, -scale, scale)", decode) + more, tmp_path)


@FUZZ
@given(
    st.sampled_from(compll.list_specs()),
    st.lists(st.tuples(st.integers(0, 2000), st.text(max_size=3)), max_size=3),
)
def test_mutated_specs(tmp_path, name, changes):
    text = locate(name).read_text()
    for at, new in changes:
        at %= len(text)
        text = text[:at] + new + text[at + 1 :]
    try_compile(text, tmp_path)


def test_nothing_of_a_spec_is_executed(tmp_path):
    for attack in (
        "__import__('os').system('true')",
        "().__class__",
        "(lambda: g)()",
        "f'{g}'",
        "open('x')",
    ):
        found = problems(GOOD.replace("mean(abs(g))", attack), tmp_path)
        assert found


def test_giant_powers_and_deep_nesting_end(tmp_path):
    try_compile(GOOD.replace("mean(abs(g))", "9**9**9**9 * mean(g)"), tmp_path)
    try_compile(GOOD.replace("mean(abs(g))", "(" * 300 + "g" + ")" * 300), tmp_path)
    try_compile(GOOD.replace("mean(abs(g))", "-" * 3000 + "g"), tmp_path)
    try_compile("[" * 5000, tmp_path)
    try_compile("a: &x [*x]", tmp_path)
