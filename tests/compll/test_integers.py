"""Whole numbers in the payload, of every type and level."""

import numpy as np
import pytest

import compll
from tests.compll.cuda_host.pieces import pieces_equal

SPEC = """name: integers
GROUP
encode:
  e: exponent(max(abs(g)))
  k: where(g < 0, 3, 7)
payload: {e: int32, k: "TYPE[n]"}
decode: exp2(e) * (k - 5) + (e if e < 0 else 0)
"""


@pytest.mark.parametrize("group", ["", "group: 32"])
@pytest.mark.parametrize("storage", ["int32", "uint32", "uint16"])
def test_numbers_below_zero_arrive(storage, group, tmp_path, rng):
    """One number of the tensor, or of a group, was read as if it had no sign."""
    text = SPEC.replace("GROUP", group).replace("TYPE", storage)
    if group:
        text = text.replace(" + (e if e < 0 else 0)", " + where(e < 0, e, 0)")
    path = tmp_path / "integers.yaml"
    path.write_text(text)
    x = np.float32(1e-3) * rng.standard_normal(1000).astype(np.float32)
    for target in ("reference", "cpu"):
        codec = compll.compile(path, target)
        y = codec.decode(codec.encode(x), len(x))
        groups = np.split(x, range(32, len(x), 32)) if group else [x]
        e = np.concatenate([0 * a + np.floor(np.log2(np.abs(a).max())) for a in groups])
        np.testing.assert_array_equal(y, np.exp2(e) * np.where(x < 0, -2, 2) + np.minimum(e, 0))
    pieces_equal(text, tmp_path, lambda n: 1e-3 * rng.standard_normal(n))


@pytest.mark.parametrize(
    "expression",
    ["e >> 1", "e & 255", "-e ^ 3", "(e | 6) << 2", "e << e", "e >> e", "e << 99", "e >> (n + 63)"],
)
def test_bits_of_one_number(expression, tmp_path):
    """Constants reach kernels as floats, which have no bits."""
    path = tmp_path / "bits.yaml"
    text = "name: bits\nencode:\n  e: exponent(max(abs(g)))\n  y: EXPRESSION\n"
    text += 'payload: {y: float32, g: "uint1[n]"}\ndecode: y + 0 * g\n'
    path.write_text(text.replace("EXPRESSION", expression))
    cpu, reference = (compll.compile(path, target) for target in ("cpu", "reference"))
    for top in (0.01, 5.0):
        x = np.array([0, top], np.float32)
        np.testing.assert_array_equal(cpu.encode(x), reference.encode(x))


HELD = """name: held
encode:
  k: EXPRESSION
  z: g
payload: {k: "TYPE", z: "float32[n]"}
decode: k + 0 * z
feedback: error
"""
ELEMENTS = ("where(g < 0, -5, 7)", "g * 1e10", "exponent(g) - 3", "g > 0", "where(g < 0, 0 / 0, g)")
NUMBERS = ("floor(sum(g) - 100)", "sum(abs(g)) * 1e9", "count(g > 0) - 5", "-1e30 * max(g)")


@pytest.mark.parametrize("storage", ["int32", "uint32", "uint16"])
@pytest.mark.parametrize("expression", [*ELEMENTS, *NUMBERS])
def test_feedback_knows_what_is_held(expression, storage, tmp_path):
    """Beyond a type's range numbers wrapped around in the payload, but not in the residual."""
    text = HELD.replace("EXPRESSION", expression)
    text = text.replace("TYPE", f"{storage}[n]" if expression in ELEMENTS else storage)
    path = tmp_path / "held.yaml"
    path.write_text(text)
    x = np.array([-1, 2, -3, 4, 0.5, 0], np.float32)
    low, high = {"int32": (-(2**31), 2**31), "uint32": (0, 2**32), "uint16": (0, 2**16 - 1)}[
        storage
    ]
    for target in ("reference", "cpu"):
        codec = compll.compile(path, target)
        state = codec.init_state(len(x))
        y = codec.decode(codec.encode(x, state=state), len(x))
        np.testing.assert_array_equal(state["residual"], x - y)
        assert (y >= low).all()
        assert (y <= high).all()
    pieces_equal(text, tmp_path, np.random.default_rng(1).standard_normal, lengths=(6, 1, 40))
