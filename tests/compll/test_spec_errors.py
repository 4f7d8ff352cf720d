"""Wrong specs: every problem at once, with its place and a hint; never a traceback."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compll
from compll.backends.cpu import backend
from compll.runtime.library import locate
from tests.compll.wrong import problems

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


#: mistakes that are wrong in more than one place
SEVERAL = ("'scale' appears twice", "'bits' is defined twice", "'n' already has a meaning")


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
        ("scale: float32", "scale: fp32", 8, 10, "unknown type 'fp32'", "'float32'"),
        ("uint[bits][n]", "int1[n]", 9, 7, "unknown type 'int1'", "`q: x < 0`, as uint1[n]"),
        ("feedback: error", "feedback: true", 11, 11, "not 'true'", "'error'"),
        ("feedback: error", "merge: majority", 11, 8, "not 'majority'", "'vote'"),
        ("feedback: error", "rounds: [scale]", 11, 9, "is a mapping of names", "p: mean"),
        ("mean(abs(g))", "bernoulli(0.5)", 5, 10, "unknown operator", "random(0, 1) < p"),
        ("mean(abs(g))", "cumsum(g)", 5, 10, "unknown operator 'cumsum'", "no running sums"),
        ("mean(abs(g))", "log10(g)", 5, 10, "unknown operator 'log10'", "log(x) / log(10)"),
        ("  bits: {", "  lambda: 1\n  bits: {", 3, 3, "'lambda' is a word", "choose another name"),
        ("mean(abs(g))", "norm1(g)", 5, 10, "unknown operator 'norm1'", "sum(abs(x))"),
        ("mean(abs(g))", "sum(g.T)", 5, 14, "a dot is not part", "transpose(m)"),
        ("mean(abs(g))", "|g|", 5, 11, "malformed YAML", "abs(x)"),
        ("choices: [1, 2, 4, 8]", "choices: 2", 3, 42, "is a list of values", "like [1, 2]"),
        ("mean(abs(g))", "hadamard(g, n)", 5, 10, "a block is a power", "hadamard(x, 1024)"),
        ("scale: float32", "scale: float33", 8, 10, "unknown type 'float33'", "'float32'"),
        ("scale: float32", "scael: float32", 8, 10, "encode does not define it", "'scale'"),
        ("mean(abs(g))", "mean(abs(g), 2, 3)", 5, 10, "takes 1 to 2 arguments, not 3", ""),
        ("mean(abs(g))", "abs(g)", 8, 10, "is declared one number but is [n]", "[n]"),
        ("mean(abs(g))", "mean(3)", 5, 10, "one value already", ""),
        ("mean(abs(g))", "g.mean()", 5, 10, "only operators can be called", "mean(...)"),
        ("mean(abs(g))", "lookup([g], 0)", 5, 17, "must follow from the parameters", ""),
        ("mean(abs(g))", "lookup([0, inf], 0)", 5, 17, "are finite, as float32", ""),
        ("mean(abs(g))", "bucket(g, [1, 0])", 5, 10, "the edges of bucket ascend", "each once"),
        ("mean(abs(g))", "sum([0, 1])", 5, 10, "it reduces elements", ""),
        ("mean(abs(g))", "2 + [0, 1]", 5, 10, "a table is no number", "lookup(table, i)"),
        ("mean(abs(g))", "lookup([], 0)", 5, 17, "literal takes 1 to 256 arguments", ""),
        ("mean(abs(g))", "sum(x for x in g)", 5, 13, "a comprehension is not part", ""),
        ("mean(abs(g))", "mean(abs(g)", 5, 14, "not an expression", ""),
        ("default: 2", "default: 3", 3, 30, "one of 1, 2, 4, 8", ""),
        ("type: int", "type: ", 3, 16, "unknown type ''", ""),
        ("type: int", "type: integer", 3, 16, "unknown type 'integer'", "'int'"),
        ("  q: where", "  scale: where", 6, 3, "'scale' appears twice", "line 5"),
        ("  q: where", "  bits: where", 6, 3, "'bits' is defined twice", ""),
        ("  q: where", "  n: where", 6, 3, "'n' already has a meaning", ""),
        ("where(q == 1, -scale, scale)", "random(0, 1)", 10, 9, "drawn in encode", "payload"),
        ("name: example", "name: [1, 2]", 1, 7, "'name' is a text", ""),
        ("name: example", "name: 1x", 1, 7, "'1x' is not a name", ""),
        ("feedback: error", "merge: sum", 11, 1, "payloads add without decoding only", ""),
        (
            "mean(abs(g))\n  q: where(g < 0, 1, 0)",
            "lookup(quantiles(g, 4), 1)\n  q: where(g < 0, 1, 0)\ngroup: 64",
            5,
            17,
            "whole tensor",
            "a table of",
        ),
        ("feedback: error", "group: 100", 11, 8, "a group cannot have 100", "power of two"),
        ("mean(abs(g))", "!mean abs(g)", 5, 10, "!mean is a tag of YAML", "not condition"),
        ("params:", "  params:", 2, 9, "malformed YAML", "indented alike"),
        ("  q: where", "\tq: where", 6, 1, "malformed YAML", "indent with spaces"),
        ("bits: {", "bitz: {", 9, 12, "unknown name 'bits'", "'bitz'"),
        ("uint[bits]", "uint[bit]", 9, 12, "unknown name 'bit'", "'bits'"),
        ("[n]", "[m]", 9, 18, "unknown length 'm'", "groups, n"),
        ("mean(", "Mean(", 5, 10, "unknown operator 'Mean'", "'mean'"),
        ("mean(", "average(", 5, 10, "unknown operator 'average'", "'mean'"),
        ("mean(", "np.mean(", 5, 10, "only operators can be called", "mean(...)"),
        ("mean(abs(g))", "torch.median(g)", 5, 10, "only operators can be", "kth_largest(...)"),
        ("mean(abs(g))", "__import__('os').system(1)", 5, 10, "only operators can", "like mean(g)"),
        ("mean(abs(g))", "mean(abs(\uff47))", 5, 19, "'\uff47' is read as 'g'", "plain letters"),
        ("mean(abs(g))", "m\u1d49an(abs(g))", 5, 10, "is read as 'mean'", "plain letters"),
        ("mean(abs(g))", "bits(g)", 5, 10, "'bits' is a value", ""),
        ("mean(abs(g))", "mean", 5, 10, "'mean' is an operator", "1 to 2 arguments"),
        ("mean(abs(g))", "mean(|g|)", 5, 15, "not an expression", "abs(x)"),
        ("g < 0", "g < 0 && 1", 6, 19, "not an expression", "a and b"),
        ("where(g < 0, 1, 0)", "'g < 0 ? 1 : 0'", 6, 13, "not an expression", "a if c else b"),
        ("where(g < 0, 1, 0)", "[1 for x in g]", 6, 6, "not a list", "quote"),
        ("mean(abs(g))", "g @ g", 5, 10, "@ takes matrices", "matrix(x, columns)"),
        ("mean(abs(g))", "~g", 5, 10, "~ is not part of the language", ""),
        ("mean(abs(g))", "mean(g, axis=0)", 5, 10, "given by position", "over all elements"),
        ("mean(abs(g))", "sum(g) & 1", 5, 10, "& takes integers", "joined by `and`; of floats"),
        ("mean(abs(g))", "sum(g) / numel(g)", 5, 19, "unknown operator", "n is the number"),
        ("mean(abs(g))", "relu(max(g))", 5, 10, "unknown operator", "max(x, 0)"),
        ("uint[bits][n]", "int4[n]", 9, 7, "unknown type 'int4'", "uint4 of q + 8"),
        ("scale: float32", "scale: float32[ceil(n / 4)]", 8, 18, "is no name", "float32[n, 1]"),
        ("  scale: mean", "\tscale: mean", 5, 1, "malformed YAML", "indent with spaces"),
        ("mean(abs(g))", "sum(g) ^ 2", 5, 10, "^ takes integers", "**"),
        ("scale: float32", "scale: float64", 8, 10, "unknown type 'float64'", "'float32'"),
        ("uint[bits][n]", "uint24[n]", 9, 7, "unknown type 'uint24'", "uint15"),
        ("uint[bits][n]", "float[bits, n]", 9, 13, "a tuple is not part", ""),
        ("uint[bits][n]", "uint4[n", 9, 7, "'uint4[n' is no type", "like"),
        ("scale: float32", "scale:", 8, 9, "'scale' needs a type", "like"),
        ("encode:", "Encode:", 4, 1, "unknown section 'Encode'", "'encode'"),
        ("decode:", "decoder:", 10, 1, "unknown section 'decoder'", "'decode'"),
        ("default: 2", "defualt: 2", 3, 21, "unknown key 'defualt'", "'default'"),
        ("{type: int, default: 2, choices: [1, 2, 4, 8]}", "", 3, 3, "needs a default", "bits: 2"),
        (
            "feedback: error",
            "feedback: errr",
            11,
            11,
            "one of none, error, own, difference, not 'errr'",
            "'error'",
        ),
        ("feedback: error", "feedback:", 11, 10, "one of none, error, own, difference, not ''", ""),
        ("feedback: error", "feedback: [error]", 11, 11, "'feedback' is a text", ""),
        ("feedback: error", "update: {scale: 1}", 11, 10, "'scale' is no state", "state:"),
        ("feedback: error", "owed: {scale: 1}", 11, 8, "'scale' in `owed:` is no state", "state:"),
        (
            "feedback: error",
            "state: {m: float32}\nupdate: {mm: 1}",
            12,
            10,
            "'mm' is no state",
            "'m'",
        ),
        ("feedback: error", "state: {m: float16}", 11, 12, "is float32, float32[n] or", ""),
        ("scale: float32", "scal3: float32", 8, 10, "encode does not define it", "'scale'"),
        ("q == 1", "g == 1", 10, 15, "decode uses 'g'", "payload fields and parameters"),
        ("q == 1", "q == step", 10, 20, "decode uses 'step'", "what depends on the step"),
        (
            "  scale: mean(abs(g))",
            "  kept: top(g, 3)\n  scale: sum(g[kep])",
            6,
            16,
            "unknown name 'kep'",
            "'kept'",
        ),
        (
            "encode:\n  scale: mean(abs(g))\n  q: where(g < 0, 1, 0)",
            "encode: 3",
            4,
            9,
            "is a mapping",
            "q: abs(g)",
        ),
    ],
)
def test_one_mistake(old, new, line, col, message, hint, tmp_path):
    assert GOOD.count(old) >= 1
    found = problems(GOOD.replace(old, new, 1), tmp_path)
    match = [d for d in found if message in d.message]
    assert match, [str(d) for d in found]
    assert len(found) == 1 or message in SEVERAL, [str(d) for d in found]
    assert (match[0].span.line, match[0].span.col) == (line, col), str(match[0])
    assert hint in match[0].hint


def test_decode_and_what_it_cannot_know(tmp_path):
    """A sender's states and its own draws: errors with advice."""
    text = GOOD.replace("feedback: error", "state:\n  m: float32[n]\nupdate: {m: g}")
    (found,) = problems(text.replace("-scale,", "m - scale,"), tmp_path)
    assert "receivers keep no states" in found.hint
    drawn = GOOD.replace("  q:", "  d: random(0, bits)\n  q:", 1).replace("g < 0", "g + d < 0")
    (found,) = problems(drawn.replace("-scale,", "d - scale,"), tmp_path)
    assert "shared(a, b)" in found.hint
    (found,) = problems(drawn.replace("random(", "g + random(").replace("-sc", "d-sc"), tmp_path)
    assert found.hint == "add it to `payload:`"
    (found,) = problems(text.replace("float32[n]", "float32"), tmp_path)
    assert found.hint == "declare it as float32[n]"


def test_all_problems_are_reported_together_and_in_order(tmp_path):
    text = GOOD.replace("mean(", "meen(").replace("g < 0", "gg < 0").replace("-scale", "-scalle")
    found = problems(text + "nonsense: 1\n", tmp_path)
    assert [d.span.line for d in found] == [5, 6, 10, 12]
    assert str(found[0]).startswith(f"{found[0].path}:5:10: unknown operator 'meen'\n    hint: ")


def test_decode_sees_what_follows_from_parameters_and_n(tmp_path):
    text = GOOD.replace("  q: where", "  levels: 2**bits + n\n  q: where")
    path = tmp_path / "spec.yaml"
    path.write_text(text.replace("-scale", "-levels"))
    # one byte is the status: decode does not use `scale`, so nothing else shows a NaN
    assert compll.compile(path, "reference").payload_bytes(8) == 7
    (found,) = problems(text.replace("+ n", "+ step").replace("-scale", "-levels"), tmp_path)
    assert "decode does not know" in found.hint


def test_a_selection_in_decode(tmp_path):
    text = locate("topk").read_text().replace("scatter(index,", "scatter(kept,")
    (found,) = problems(text, tmp_path)
    assert "indices(kept)" in found.hint


def test_a_spec_in_this_folder_is_named_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(compll.SpecError, match=r"there is no spec 'mine'\n.*mine\.yaml"):
        compll.compile("mine")
    assert compll.compile("mine.yaml", "reference").name == "example"


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


@pytest.mark.parametrize(
    "expr, kind",
    [
        ("indices(kept)", "uint16"),
        ("indices(kept)", "uint8"),
        ("indices(kept) % 7", "int32"),
        ("exponent(g)[kept]", "uint32"),
    ],
)
def test_positions_stand_in_a_payload_as_they_are(tmp_path, expr, kind):
    text = f"""name: narrow
encode:
  kept: filter(g > 0, n)
  i: {expr}
  v: g[kept]
payload: {{i: "{kind}[kept]", v: "float32[kept]"}}
decode: scatter(i, v)
"""
    (found,) = problems(text, tmp_path)
    assert (found.span.line, found.span.col) == (7, 9)
    assert "'i' does not hold the positions" in found.message
    assert "uint32, gaps" in found.hint


def test_parameters(tmp_path):
    found = problems(GOOD, tmp_path, bits=3)
    assert "one of 1, 2, 4, 8" in found[0].message
    found = problems(GOOD, tmp_path, bit=2)
    assert "'bits'" in found[0].hint
    found = problems(GOOD, tmp_path, bits=True)
    assert "is int" in found[0].message


def try_compile(text, folder):
    path = folder / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        codec = compll.compile(path, "reference")
        backend.source(codec.module)
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
        st.tuples(
            st.sampled_from(sorted(compll.frontend.operators.OPERATORS)),
            st.lists(inner, max_size=3),
        ).map(lambda t: f"{t[0]}({', '.join(t[1])})"),
        st.tuples(inner, st.sampled_from(INFIX), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]}[{t[1]}]"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
    ),
    max_leaves=8,
)


@settings(FUZZ, max_examples=60)
@given(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS, st.sampled_from(["", "group: 64\n"]))
def test_arbitrary_expressions(tmp_path, scale, q, decode, more):
    text = GOOD.replace("mean(abs(g))", scale).replace("where(g < 0, 1, 0)", q)
    try_compile(text.replace("where(q == 1, -scale, scale)", decode) + more, tmp_path)


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


def test_a_matrix_whose_type_was_not_written_keeps_its_shape(tmp_path):
    path = tmp_path / "atomo.yaml"
    text = locate("atomo").read_text()
    path.write_text(re.sub(r"(payload:\n  left:).*", r"\1", text))
    with pytest.raises(compll.SpecError) as found:
        compll.compile(path, "reference")
    assert [d.message for d in found.value.diagnostics] == ["'left' needs a type"]


def test_a_section_that_is_not_indented_hides_no_other_mistake(tmp_path):
    """'scale' was once taken for 'state', with a second error about that."""
    text = GOOD.replace("  scale: mean", "scale: meen").replace("  q: where", "q: where")
    told = problems(text, tmp_path)
    assert [(d.span.line, d.span.col) for d in told] == [(5, 1), (5, 8), (6, 1)]
    assert told[0].hint == told[2].hint == "indent it, as an entry of `encode:`"
    assert told[1].message == "unknown operator 'meen'"
