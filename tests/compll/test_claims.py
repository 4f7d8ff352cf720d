"""`compll check` tests a spec's claims on data, and prints figures where they do not hold."""

import re

import pytest

from compll.runtime.library import warnings

SPEC = """\
name: claims
{more}
encode:
{encode}
payload: {{{payload}}}
decode: {decode}
"""


def told(tmp_path, encode, payload, decode="q", more="about: x"):
    """The warnings of a spec: lines and texts."""
    path = tmp_path / "spec.yaml"
    lines = "\n".join(f"  {line}" for line in encode.splitlines())
    path.write_text(SPEC.format(encode=lines, payload=payload, decode=decode, more=more))
    return [(d.span.line, f"{d.message} {d.hint}") for d in warnings(path, {})]


def test_a_draw_that_changes_nothing_is_not_unbiased(tmp_path):
    """Rounding to nearest, with a random term too small to matter."""
    encode = "top: max(abs(g))\nq: floor(g / top * 7 + 0.5 + random(0, 1e-9)) + 7"
    found = told(
        tmp_path, encode, "top: float32, q: 'uint4[n]'", "(q - 7) * top / 7", "unbiased: true"
    )
    ((line, text),) = found
    assert line == 2
    assert re.search(
        r"200 draws is off by 0\.1\d of their norm, .* standard error is [\d.e-]+ ", text
    )


def test_a_claim_that_fails_for_tiny_gradients_only(tmp_path):
    encode = "top: max(abs(g))\nq: floor(g * (7 / top) + random(0, 1)) + 7"
    payload, decode = "top: float32, q: 'uint4[n]'", "(q - 7) * top / 7"
    more = "group: 64\nunbiased: true"
    ((_, text),) = told(tmp_path, encode, payload, decode, more)
    assert "does not hold for tiny gradients: the mean of 200 draws is off by " in text
    sound = "top: max(abs(g))\nsize: max(top, 1e-30)\nq: floor(g * (7 / size) + random(0, 1)) + 7"
    decode = "(q - 7) * (max(top, 1e-30) / 7)"
    assert told(tmp_path, sound, payload, decode, more) == []


def test_votes_that_turn_around(tmp_path):
    found = told(tmp_path, "q: g < 0", "q: 'uint1[n]'", "where(q, 1, -1)", "merge: vote")
    assert [line for line, _ in found] == [2]
    assert "100% of the elements are decided against the majority" in found[0][1]
    assert told(tmp_path, "q: g < 0", "q: 'uint1[n]'", "where(q, -1, 1)", "merge: vote") == []


def test_tensors_for_which_a_payload_is_longer(tmp_path):
    encode, payload = "q: g\nr: 0 * g", "q: 'float32[n]', r: 'float32[n]'"
    ((_, text),) = told(tmp_path, encode, payload, "q + r", "when: n > 50")
    assert "`when` holds for 100 elements, whose payload of 800 bytes is longer" in text
    assert told(tmp_path, encode, payload, "q + r", "when: n > 50000") == []


def test_bounds_that_leave_elements_out(tmp_path):
    encode = "kept: filter(abs(g) > 0.5, {bound})\nindex: indices(kept)\nvalue: g[kept]"
    payload, decode = "index: 'gaps[kept]', value: 'float32[kept]'", "scatter(index, value)"
    ((_, text),) = told(tmp_path, encode.format(bound=40), payload, decode)
    assert "'kept' keeps 40 elements of 1000 with a normal distribution" in text
    assert told(tmp_path, encode.format(bound=900), payload, decode) == []
    # with feedback the first elements come again and again, and the last ones have no turn
    ((_, text),) = told(tmp_path, encode.format(bound=40), payload, decode, "feedback: error")
    assert "lost for good: 'residual' grows 2 times" in text
    assert told(tmp_path, encode.format(bound=900), payload, decode, "feedback: error") == []


@pytest.mark.parametrize(
    "param, words",
    [
        ("{type: float, default: 1, min: 0}", "decodes to NaN or infinity: .* with p=0.0"),
        ("{type: float, default: 1, min: 0.5, max: 3}", ""),
        ("{type: int, default: 1, choices: [1, 0]}", "decodes to NaN or infinity: .* with p=0"),
    ],
)
def test_the_ends_of_parameters_are_tried(param, words, tmp_path):
    found = told(tmp_path, "q: g / p", "q: 'float32[n]'", more=f"params: {{p: {param}}}")
    assert bool(found) == bool(words)
    assert all(re.search(words, text) for _, text in found)


def test_a_spec_that_takes_no_such_gradient_has_no_warning(tmp_path):
    """Its matrix is too small: encode raises an error, but `compll check` goes on."""
    encode, payload = "q: ones(1, 1) * random_matrix(1, 1) + sum(g)", "q: 'float32[1, 1]'"
    assert told(tmp_path, encode, payload, "flat(q)", "unbiased: true") == []
