"""Mutated specs and arbitrary YAML give diagnostics or a codec, soon; never a traceback."""

import re

import jsonschema
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compll
from compll.backends.cpu import backend
from compll.frontend.source import SECTIONS
from compll.runtime import library, lint
from compll.runtime.library import locate
from compll.tools.schema import schema

VALIDATOR = jsonschema.Draft7Validator(schema())
TEXTS = {name: locate(name).read_text() for name in compll.list_specs()}
TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\*\*|//|<=|>=|==|\s+|.", re.DOTALL)
ODD = {"?", "\0", "é", "&a", "*a", "@", "|"}
TOKENS = sorted({t for text in TEXTS.values() for t in TOKEN.findall(text)} | ODD)
SECTIONS_OF = {name: re.split(r"\n(?=\w)", text.rstrip("\n")) for name, text in TEXTS.items()}
ALL_SECTIONS = sorted({s for parts in SECTIONS_OF.values() for s in parts})
PLACES = st.integers(0, 10**6)


@st.composite
def by_tokens(draw):
    parts = TOKEN.findall(TEXTS[draw(st.sampled_from(sorted(TEXTS)))])
    for _ in range(draw(st.integers(1, 4))):
        at, kind = draw(PLACES) % len(parts), draw(st.sampled_from(["drop", "repeat", "replace"]))
        new = {"drop": [], "repeat": [parts[at]] * 2}.get(kind)
        parts[at : at + 1] = [draw(st.sampled_from(TOKENS))] if new is None else new
        parts = parts or [" "]
    return "".join(parts)


@st.composite
def by_sections(draw):
    parts = list(SECTIONS_OF[draw(st.sampled_from(sorted(TEXTS)))])
    for _ in range(draw(st.integers(1, 3))):
        at, kind = draw(PLACES) % len(parts), draw(st.sampled_from(["drop", "swap", "add"]))
        new = [] if kind == "drop" else [draw(st.sampled_from(ALL_SECTIONS))]
        parts[at : at + (kind != "add")] = new
        parts = parts or ["name: x"]
    return "\n".join(parts) + "\n"


@st.composite
def by_values(draw):
    """A scalar exchanged for another value, of any kind."""
    text = TEXTS[draw(st.sampled_from(sorted(TEXTS)))]
    spots = [m.span(1) for m in re.finditer(r": ([^\n{}]+)", text)]
    start, end = spots[draw(PLACES) % len(spots)]
    values = st.one_of(
        st.sampled_from(["", "~", "[]", "{}", "[1, 2]", "{a: b}", "!!python/name:os.system", "*a"]),
        st.sampled_from(["1e999", "-1", "0", "9" * 300, "nan", ".inf", "0x10", "n", "g", "step"]),
        st.sampled_from(["__import__('os').system('touch pwned')", "open('pwned', 'w')"]),
        st.text(max_size=8),
    )
    return text[:start] + draw(values) + text[end:]


def check_diagnostics(found, text):
    """Every problem has a message and a place inside the text."""
    last = len(re.findall("\n|\r|\x85|\u2028|\u2029", text)) + 2
    assert found
    assert all(d.message and 1 <= d.span.line <= last and d.span.col >= 1 for d in found)


def outcome(text, folder):
    """Compile and run the text as far as it goes; asserts that any error is a right one."""
    path = folder / "spec.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        codec = compll.compile(path, "reference")
        backend.source(codec.module)
    except compll.SpecError as error:
        check_diagnostics(error.diagnostics, text)
        return None
    if warned := library.warnings(path, {}):
        check_diagnostics(warned, text)
    x = np.linspace(-1, 1, 100, dtype=np.float32)
    with np.errstate(all="ignore"):
        payload = codec.encode(x, state=codec.init_state(100) or None, step=1)
        assert len(payload) <= codec.payload_bytes(100)
        assert codec.decode(payload, 100).shape == (100,)
    return codec


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """Claims are tried with all their draws in test_claims.py."""
    monkeypatch.setattr(lint, "DRAWS", 20)


def examples(count):
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


MUTATED = examples(150)


@examples(30)
@given(text=st.one_of(by_tokens(), by_sections(), by_values()))
def test_mutated_specs_compile_or_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome(text, tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
@MUTATED
@given(text=by_values())
def test_other_values_compile_or_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome(text, tmp_path)
    assert not (tmp_path / "pwned").exists()


YAML = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*SECTIONS, "x", "type", "default"]), inner, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@MUTATED
@given(value=YAML)
def test_arbitrary_yaml(value, tmp_path):
    outcome(yaml.safe_dump(value, allow_unicode=True), tmp_path)


@pytest.mark.slow
@MUTATED
@given(value=st.fixed_dictionaries(dict.fromkeys(SECTIONS, YAML)))
def test_arbitrary_values_of_all_sections(value, tmp_path):
    outcome(yaml.safe_dump(value, allow_unicode=True), tmp_path)


@pytest.mark.slow
@MUTATED
@given(text=st.one_of(by_tokens(), by_sections()))
def test_specs_that_compile_fit_the_schema(text, tmp_path):
    if outcome(text, tmp_path) is not None:
        document = yaml.load(text, Loader=yaml.BaseLoader)
        assert [e.message for e in VALIDATOR.iter_errors(document)] == []
