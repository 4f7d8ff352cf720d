"""`feedback: {decay: ...}`: the residual shrinks before it is added; the same on all backends."""

from pathlib import Path

import numpy as np
import pytest

import compll
from tests.compll.cuda_host.pieces import pieces_equal
from tests.compll.wrong import refuses
from tests.tiers import first_fast

SPECS = Path(__file__).parents[2] / "specs"
OWN = "{of: own if residual else none, decay: 0.9}"
SIMPLE = """name: simple
params: {beta: {type: float, default: 0.9}}
encode: {s: max(abs(g)) + 1e-30, q: round(g / s) + 1}
payload: {s: float32, q: "uint2[n]"}
decode: (q - 1) * s
feedback: {decay: beta}
"""


def decayed(name):
    """A library spec's text with a decaying residual."""
    text = (SPECS / f"{name}.yaml").read_text()
    old = "feedback: own if residual else none" if "feedback: own" in text else "feedback: error"
    assert old in text
    return text.replace(old, f"feedback: {OWN if 'own' in old else '{decay: 0.9}'}")


NAMES = ("powersgd", "simple", "topk", "onebit_group", "randomk", "thc")


@pytest.mark.parametrize("params", first_fast([{}, {"residual": "bfloat16"}]))
@pytest.mark.parametrize("name", first_fast(NAMES))
def test_backends_agree(name, params, tmp_path, rng):
    if name in ("randomk", "thc"):
        params = {}  # whose own parameter has the name
    text = SIMPLE if name == "simple" else decayed(name)
    lengths = (1024, 31, 2001)
    values = rng.standard_normal
    pieces_equal(text, tmp_path, values, lengths=lengths, on=("cpu", "cuda"), **params)


def test_a_residual_decays_before_it_is_added(tmp_path, rng):
    path = tmp_path / "simple.yaml"
    path.write_text(SIMPLE)
    codec, n = compll.compile(path, beta=0.5), 1000
    x, state = rng.standard_normal(n).astype(np.float32), codec.init_state(n)
    residual = np.zeros(n, np.float32)
    for _ in range(3):
        sent = codec.decode(codec.encode(x, state=state), n)
        residual = (x + np.float32(0.5) * residual) - sent
        assert np.array_equal(state["residual"], residual)
    whole = compll.compile(path, beta=1.0)
    path.write_text(
        SIMPLE.replace("{decay: beta}", "error").replace("{beta: {type: float, default: 0.9}}", "")
    )
    usual = compll.compile(path)
    assert all(
        np.array_equal(whole.encode(x, state=a), usual.encode(x, state=b))
        for a, b in [(whole.init_state(n), usual.init_state(n))]
    )


@pytest.mark.parametrize(
    "given, message",
    [
        ("{decay: 1.5}", "a decay is a factor from 0 to 1, not 1.5"),
        ("{of: error}", "this feedback has no 'decay'"),
        ("{decay: 0.5, off: own}", "'off' in `feedback`"),
        ("{decay: n}", "must follow from the parameters alone"),
        (
            "{decay: 0.5, of: owned}",
            "is one of none, error, own, difference, not 'owned'",
        ),
    ],
)
def test_mistakes_are_told(given, message, tmp_path):
    refuses(SIMPLE.replace("{decay: beta}", given), message, tmp_path)
