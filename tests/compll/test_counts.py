"""Numbers of elements beyond int64 mean all elements, on every backend."""

import numpy as np
import pytest

import compll

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
