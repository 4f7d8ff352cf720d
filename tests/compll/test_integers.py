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
