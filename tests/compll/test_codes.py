"""The CPU packs selected elements' codes as the reference does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import compll
from compll.numerics import numbers
from tests.tiers import first_fast

SPEC = """name: coded
{group}
encode:
  kept: filter(g >= 0)
  index: indices(kept)
  code: g[kept]
payload: {{index: "gaps[kept]", code: "uint{bits}[kept]"}}
decode: scatter(index, code)
"""


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", first_fast([64, 8, 1024]))
def test_codes_of_selected_elements(bits, tile, tmp_path):
    path = tmp_path / "coded.yaml"
    path.write_text(SPEC.format(bits=bits, group=f"group: {tile}" if tile < 1024 else ""))
    codec = compll.compile(path)

    @given(count=st.integers(1, 2500), seed=st.integers(0, 99))
    def equal(count, seed):
        codes = np.random.default_rng(seed).integers(0, 1 << bits, count, np.uint8)
        payload = codec.encode(codes.astype(np.float32))
        wanted = numbers.pack(codes, bits, tile)
        end = len(payload) - codec.module.status
        assert np.array_equal(payload[end - len(wanted) : end], wanted)
        assert np.array_equal(codec.decode(payload, count), codes)

    equal()
