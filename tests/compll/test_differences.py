"""`feedback: difference`: encode sees differences from a reference that takes up what it sends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import compll
from tests.compll.wrong import problems, refuses

SPECS = Path(__file__).parents[2] / "specs"
QUANTIZER = """
name: simple
params: {share: 0.25}
encode:
  top: bfloat16_up(max(abs(g)))
  q: floor((g / top + 1) * 7.5 + random(0, 1))
payload: {top: bfloat16, q: "uint4[n]"}
decode: (q / 7.5 - 1) * top
feedback: {difference: share}
"""


def written(folder, text=QUANTIZER):
    path = folder / "simple.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["simple", "ef21", "diana"])
def test_a_reference_takes_up_what_is_decoded(name, target, tmp_path, rng):
    """Payloads are those of the same spec without feedback, of the gradient less the reference."""
    path = written(tmp_path) if name == "simple" else SPECS / f"{name}.yaml"
    plain = tmp_path / "plain.yaml"
    plain.write_text(path.read_text().partition("feedback:")[0])
    codec, without = (compll.compile(each, target) for each in (path, plain))
    n, share = 5000, np.float32(codec.difference)
    assert share == {"simple": np.float32(0.25), "ef21": 1, "diana": np.float32(0.1)}[name]
    state, reference = codec.init_state(n), np.zeros(n, np.float32)
    for step in range(4):
        x = rng.standard_normal(n).astype(np.float32)
        payload = codec.encode(x, state=state, step=step)
        assert payload.tobytes() == without.encode(x - reference, step=step).tobytes()
        reference += share * codec.decode(payload, n, step=step)
        assert np.array_equal(state["reference"], reference)
        assert not state["mean"].any()  # it is the receivers' own


@pytest.mark.parametrize("name", ["ef21", "diana"])
def test_a_reference_takes_up_nothing_infinite(name, rng):
    codecs = [compll.compile(name, target) for target in ("cpu", "reference")]
    n = 3000
    states = [codec.init_state(n) for codec in codecs]
    for step in range(4):
        x = rng.standard_normal(n).astype(np.float32)
        x[7] = np.inf if step == 2 else x[7]
        one, other = (
            codec.encode(x, state=state, step=step)
            for codec, state in zip(codecs, states, strict=True)
        )
        assert one.tobytes() == other.tobytes()
        assert np.array_equal(states[0]["reference"], states[1]["reference"])
        assert np.isfinite(states[0]["reference"]).all()


def test_such_a_codec_is_encoded_once_and_has_no_residual():
    codec = compll.compile("ef21")
    assert not codec.reencodes
    assert sorted(codec.init_state(3)) == ["mean", "reference"]
    assert compll.compile("topk").difference is None
    with pytest.raises(compll.CompllError, match="residual"):
        compll.compile("ef21", residual="bfloat16")


@pytest.mark.parametrize(
    "feedback, message",
    [
        ("{difference: 1.5}", "a difference is a factor from 0 to 1, not 1.5"),
        ("{difference: n}", "must follow from the parameters alone"),
        ("{difference: 0.5, decay: 0.5}", "'decay' does not go with 'difference'"),
        ("{difference: 0.5, of: own}", "'of' does not go with 'difference'"),
        ("differences", "'feedback' is one of none, error, own, difference, not 'differences'"),
        ("difference\nstate: {mean: float32}\nupdate: {mean: mean}", "makes the state 'mean'"),
    ],
)  # fmt: skip
def test_wrong_feedback_is_refused(feedback, message, tmp_path):
    found = problems(QUANTIZER.replace("{difference: share}", feedback), tmp_path)
    assert any(message in f"{d.message} {d.hint}" for d in found)


def test_a_decode_that_mixes_elements_is_refused(tmp_path):
    text = (SPECS / "powersgd.yaml").read_text()
    text = text.replace("feedback: error", "feedback: difference")
    refuses(text, "cannot have feedback of differences", tmp_path)
