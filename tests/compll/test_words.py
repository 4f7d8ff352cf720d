"""Parameters of type str, compared with texts."""

import numpy as np
import pytest

import compll
from compll.errors import SpecError
from tests.compll.wrong import problems
from tests.tiers import first_fast

SPEC = """\
name: modes
params:
  mode: {type: str, default: near, choices: [near, up, down]}
  any: {type: str, default: x}
  k: 3
encode:
  q: floor(g + 0.5) if mode == 'near' else ceil(g) if 'up' == mode else floor(g)
payload: {q: "float32[n]"}
decode: "-q if any != 'x' else q"
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "modes.yaml"
    path.write_text(SPEC)
    return path


@pytest.mark.parametrize("target", first_fast(["reference", "cpu"]))
@pytest.mark.parametrize(
    "params, expected",
    [
        ({}, [1, -2]),
        ({"mode": "up"}, [2, -1]),
        ({"mode": "down", "any": "y"}, [-1, 2]),
    ],
)
def test_a_text_chooses_a_branch(spec, target, params, expected):
    codec = compll.compile(spec, target, **params)
    x = np.array([1.25, -1.75], np.float32)
    assert codec.decode(codec.encode(x), 2).tolist() == expected


def test_only_the_branch_that_holds_is_compiled(spec):
    assert "ceil" not in compll.compile(spec).backend.text()


@pytest.mark.parametrize(
    "new, column, message",
    [
        ("g if mode == 'nera' else 0", 19, "parameter 'mode' is never 'nera'"),
        ("g if k == 'near' else 0", 11, "a text is compared with a parameter of type str"),
        ("g * (g == 'near')", 11, "a text is compared with a parameter of type str"),
        ("g * ('a' == 'a')", 11, "a text is compared with a parameter of type str"),
        ("g if mode < 'near' else 0", 18, "a text is not part of the language"),
        ("sum('near') + g", 10, "a text is not part of the language"),
        ("g * mode", 6, "a number is needed, not str"),
        ("g if mood == 'near' else 0", 11, "unknown name 'mood'"),
        ("g if mode == near else 0", 19, "unknown name 'near'"),
        ("g if mode else 0", 6, "a number is needed, not str"),
        ("where(not mode, g, 0)", 12, "a number is needed, not str"),
        ("g if mode == None else 0", 19, "None is not part of the language"),
    ],
)
def test_a_wrong_use_is_told(new, column, message, tmp_path):
    lines = SPEC.splitlines()
    lines[6] = f"  q: {new}"
    (only,) = problems("\n".join(lines), tmp_path)
    assert message in only.message
    assert (only.span.line, only.span.col) == (7, column)


def test_an_unknown_text_is_no_value_of_the_parameter(spec):
    with pytest.raises(SpecError, match="one of near, up, down, not 'sideways'"):
        compll.compile(spec, mode="sideways")
