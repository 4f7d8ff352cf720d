"""exponent and exp2 are exact at every level of the language."""

import numpy as np
import pytest

import compll
from compll.numerics.bits import exp2, exponent
from tests.compll.wrong import refuses

SPEC = """
name: bits
params: {{p: {p}}}
{group}
encode:
  e: exponent(g)
  h: exponent(max(abs(g)))
  y: exp2(e) + exp2(h) + exp2(exponent(p * n)) + exp2(e > 0) + exp2(-300) + exponent(p)
payload: {{y: "float32[n]"}}
decode: y
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "group: 64"])
@pytest.mark.parametrize("p", [1.0, 0.7, 1e-3, 3e5])
def test_all_levels(p, group, tmp_path):
    path = tmp_path / "bits.yaml"
    path.write_text(SPEC.format(p=p, group=group))
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(640) * np.exp2(rng.integers(-20, 20, 640))).astype(np.float32)
    tops = np.abs(x).reshape(-1, 64 if group else 640).max(1)
    h = np.repeat(np.floor(np.log2(tops)), len(x) // len(tops))
    e = np.floor(np.log2(np.abs(x)))
    want = np.exp2(e) + np.exp2(h) + np.exp2(np.floor(np.log2(p * 640))) + np.exp2(e > 0)
    for target in ("reference", "cpu"):
        codec = compll.compile(path, target)
        y = codec.decode(codec.encode(x), 640)
        np.testing.assert_allclose(y, want + np.floor(np.log2(p)), rtol=1e-6, atol=1e-6)


def test_every_power_and_what_lies_beyond():
    i = np.arange(-200, 200, dtype=np.int32)
    powers = exp2(i)
    normal = (i >= -126) & (i <= 127)
    np.testing.assert_array_equal(powers[normal], np.ldexp(np.float32(1), i[normal]))
    assert (powers[i < -126] == 0).all()
    assert np.isposinf(powers[i > 127]).all()
    np.testing.assert_array_equal(exponent(-powers[normal]), i[normal])
    odd = np.array([0, -0.0, 1e-45, np.inf, np.nan], np.float32)
    assert exponent(odd).tolist() == [-127, -127, -127, 128, 128]


def test_exp2_takes_an_integer(tmp_path):
    text = "name: bad\nencode: {y: exp2(g)}\npayload: {y: 'float32[n]'}\ndecode: y\n"
    refuses(text, r"spec.yaml:2:.*exp2 takes an integer", tmp_path)
