"""Undefined names, reported once, with advice."""

import re

import numpy as np
import pytest

import compll
from compll.errors import Problems
from compll.runtime.library import load, locate
from tests.compll.test_spec_errors import GOOD
from tests.compll.wrong import problems
from tests.tiers import first_fast

SPECS = compll.list_specs()


@pytest.mark.parametrize(
    "old, new, place, message, hint",
    [
        ("mean(abs(g))", "sum(q)", (5, 14), "'q' is defined below, in line 6", "in order"),
        ("mean(abs(g))", "scale + 1", (5, 10), "'scale' is used in its own definition", "state"),
        (
            "mean(abs(g))",
            "mean(abs(g)) + bitts",
            (5, 25),
            "unknown name 'bitts'",
            "'bits'",
        ),
        (
            "decode: where(q == 1, -scale, scale)",
            "decode:\n  a: b + 1\n  b: where(q == 1, -scale, scale)\n  c: a + b",
            (11, 6),
            "'b' is defined below, in line 12",
            "in order",
        ),
        # in decode, names of encode are reported as before
        ("where(q == 1", "where(q == g", (10, 20), "decode uses 'g'", "payload fields"),
    ],
)
def test_names_are_defined_in_order(old, new, place, message, hint, tmp_path):
    (found,) = problems(GOOD.replace(old, new, 1), tmp_path)
    assert (found.span.line, found.span.col) == place
    assert message in found.message
    assert hint in found.hint


LEVELS = """\
name: levels
group: 64
encode:
  e: max(abs(g))
  part: filter(g > 0)
  other: {other}
payload: {{{payload}}}
decode: g
"""


@pytest.mark.parametrize(
    "other, payload, message, hint",
    [
        ("g", "e: uint4, g: 'float32[n]'",
         "'e' is one number per group, and uint4 holds elements", "use uint8, uint16"),
        ("top(g[part], 3)", "g: 'float32[n]'",
         "top looks at the whole tensor", "top_columns"),
        ("filter(g[part] > 1)", "g: 'float32[n]'",
         "filter selects among all elements or drawn ones, and this has those of 'part' alone",
         "both conditions"),
        ("filter(e > 1)", "g: 'float32[n]'",
         "filter selects among elements, and this is one number of a group", ""),
        ("sum_bye(g)", "g: 'float32[n]'", "unknown operator 'sum_bye'", "did you mean"),
        ("xyz(g)", "g: 'float32[n]'", "unknown operator 'xyz'", ""),
    ],
)  # fmt: skip
def test_a_key_at_the_wrong_level_is_refused_with_a_hint(other, payload, message, hint, tmp_path):
    found = problems(LEVELS.format(other=other, payload=payload), tmp_path)
    (one,) = [each for each in found if message in each.message]
    assert hint in one.hint
    assert len(one.hint) < 250


def lines_and_bindings(name):
    path = locate(name)
    return path.read_text("utf-8").splitlines(), load(path, Problems("")).encode


@pytest.mark.parametrize("name", first_fast(dict.fromkeys(["sidco_e", *SPECS])))
def test_a_wrong_definition_is_one_error_wherever_it_is_used(name, tmp_path):
    lines, bindings = lines_and_bindings(name)
    for binding in bindings:
        at = binding.span.line - 1
        for wrong in ("nosuch(g)", "g +"):
            broken = [*lines[:at], f"  {binding.name}: {wrong}", *lines[at + 1 :]]
            (found,) = problems("\n".join(broken) + "\n", tmp_path)
            assert found.span.line == at + 1


@pytest.mark.parametrize("name", SPECS)
def test_a_name_used_before_its_definition_is_said_to_be_below(name, tmp_path):
    lines, bindings = lines_and_bindings(name)
    if len(bindings) < 2:
        return
    at, last = bindings[0].span.line - 1, bindings[-1].span.line - 1
    late = [*lines[:at], *lines[at + 1 : last + 1], lines[at], *lines[last + 1 :]]
    first = bindings[0].name
    if not any(re.search(rf"\b{first}\b", line) for line in late[at:last]):
        compll.compile(written(late, tmp_path), "reference")
        return
    found = {d.message for d in problems("\n".join(late) + "\n", tmp_path)}
    assert found == {f"{first!r} is defined below, in line {last + 1}"}


def written(lines, folder):
    path = folder / "spec.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


STATE = """name: example
params: {rank: 2}
state: {m: "float32[rows, rank]"}
encode:
  rows: ceil(n / 8)
  a: matrix(g, 8) @ random_matrix(8, rank)
payload: {a: "float32[rows, rank]"}
decode: flat(a @ transpose(random_matrix(8, rank)))
update: {m: a}
"""


@pytest.mark.parametrize(
    "old, new, place, message, hint",
    [
        ("ceil(n / 8)", "ceil(m / 8)", (3, 21), "rows and columns are", "'rows' depends on data"),
        ("ceil(n / 8)", "ciel(n / 8)", (5, 9), "unknown operator 'ciel'", "'ceil'"),
        ("ceil(n / 8)", "ceil(nn / 8)", (5, 14), "unknown name 'nn'", "'nan'"),
        ("ceil(n / 8)\n", "eight\n  eight: ceil(n / 8)\n", (5, 9), "'eight' is defined below", ""),
        ("{m: \"float32[rows", "{m: \"float32[row", (3, 21), "unknown name 'row'", "'rows'"),
        ('{m: "float32[rows', '{m: "float32[a', (3, 21), "rows and columns are", "'a' depends"),
    ],
)  # fmt: skip
def test_the_size_of_a_state(old, new, place, message, hint, tmp_path):
    written(STATE.splitlines(), tmp_path)
    compll.compile(tmp_path / "spec.yaml", "reference")
    (found,) = problems(STATE.replace(old, new, 1), tmp_path)
    assert (found.span.line, found.span.col) == place
    assert message in found.message
    assert hint in found.hint


@pytest.mark.parametrize(
    "spec, section, wrong",
    [
        ("dithering", "decode", "  out: [1, 2]"),
        ("dithering", "decode", "  out:"),
        ("onebit_sgd", "payload", "payload: {}"),
        ("powersgd", "rounds", "rounds: [1, 2]"),
        ("powersgd", "rounds", "rounds: uint7[n]"),
        ("adacomp", "state", "state:"),
    ],
)
def test_a_wrong_section_is_one_error(spec, section, wrong, tmp_path):
    """Its names, or the last of them, are undefined then; their uses are no further mistakes."""
    lines = locate(spec).read_text("utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{section}:"))
    inner = [i for i in range(at + 1, len(lines)) if lines[i].startswith("  ")]
    where = inner[-1] if wrong.startswith("  ") else at
    broken = [*lines[:where], wrong, *lines[where + 1 :]]
    (found,) = problems("\n".join(broken) + "\n", tmp_path)
    if section == "state":
        assert found.message == "'r' is no state"
        assert '`state: {r: "float32[n]"}`' in found.hint


@pytest.mark.parametrize("name", ["target", "name_or_path"])
def test_a_parameter_that_cannot_be_given(name, tmp_path):
    (found,) = problems(re.sub(r"\bbits\b", name, GOOD), tmp_path)
    assert found.message.startswith(f"{name!r} cannot be given")


def test_draws_of_update_are_others_than_those_of_encode(tmp_path):
    path = tmp_path / "draws.yaml"
    path.write_text(
        "name: draws\nstate: {s: 'float32[n]'}\nencode: {r: 'random(0, 1)', q: g + r}\n"
        "payload: {q: 'float32[n]'}\ndecode: q\nupdate: {s: 'random(0, 1) - r'}\n"
    )
    for target in ("reference", "cpu"):
        codec = compll.compile(path, target)
        state = codec.init_state(100)
        codec.encode(np.zeros(100, np.float32), state=state)
        assert np.count_nonzero(state["s"]) > 90


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("where(g < 0, 1, 0)", "top(abs(g), 3)", "'q' is a selection, not numbers"),
        ("where(q == 1, -scale, scale)", "top(abx(q), 3)", "unknown operator 'abx'"),
    ],
)
def test_a_wrong_use_of_a_selection_is_one_mistake(old, new, message, tmp_path):
    (found,) = problems(GOOD.replace(old, new, 1), tmp_path)
    assert message in found.message
