"""Numbers of elements beyond int64 mean all elements, on every backend."""

import numpy as np
import pytest

import compll
from tests.compll.cuda_host.pieces import pieces_equal

SPEC = """
name: counted
params: {k: 3.0}
encode:
  kept: top(abs(g), k)
  i: indices(kept)
  v: g[kept]
  least: kth_largest(abs(g), k)
  second: kth_largest(sample(abs(g), k), 2)
payload: {i: "uint32[kept]", v: "float32[kept]", least: float32, second: float32}
decode: scatter(i, v)
"""


@pytest.mark.parametrize("k", [-1e30, 0.0, 1e19, 2.0**63, 1e300])
def test_a_number_beyond_int64_is_all_elements(k, tmp_path):
    path = tmp_path / "counted.yaml"
    path.write_text(SPEC)
    cpu, reference = (compll.compile(path, target, k=k) for target in ("cpu", "reference"))
    for n in (8, 3000):
        x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
        payload = cpu.encode(x)
        assert np.array_equal(payload, reference.encode(x))
        if k > 0:
            assert np.array_equal(cpu.decode(payload, n), x)


LARGE = """
name: large
params: {big: 5}
encode:
  e: exponent(g)
  c: count(g > 0)
  v: min(e * (n * (1 << 31)) + e, big - n * (1 << 62) * (1 << 62))
  w: where(e < (1 << 40), 1, 0) + where(e > c * (c + 1) * (1 << 31), 2, 0)
payload: {v: "int32[n]", w: "uint[2][n]"}
decode: v * 1.0 + w
"""


@pytest.mark.slow
@pytest.mark.parametrize("big", [5, 2**62, -(2**62)])
def test_a_whole_number_beyond_int32_is_the_nearest_one_among_elements(big, tmp_path, rng):
    spec = LARGE.replace("big: 5", f"big: {big}")
    pieces_equal(spec, tmp_path, rng.standard_normal)
    path = tmp_path / "large.yaml"
    path.write_text(spec)
    cpu, reference = (compll.compile(path, target) for target in ("cpu", "reference"))
    for n in (5, 70_000):
        x = rng.standard_normal(n).astype(np.float32)
        payload = reference.encode(x)
        assert np.array_equal(cpu.encode(x), payload)
        assert np.array_equal(cpu.decode(payload, n), reference.decode(payload, n))


@pytest.mark.slow
def test_a_whole_number_beyond_float64_is_infinite(tmp_path):
    path = tmp_path / "huge.yaml"
    many = " * ".join(["(1 << 62)"] * 17)
    path.write_text(
        f"name: huge\nencode:\n  v: where(g > -n * {many}, g, 0)\n"
        'payload: {v: "float32[n]"}\ndecode: v\n'
    )
    x = np.arange(-3, 4).astype(np.float32)
    for target in ("cpu", "reference"):
        codec = compll.compile(path, target)
        assert np.array_equal(codec.decode(codec.encode(x), 7), x)
