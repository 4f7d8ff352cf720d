"""Packing of selected elements' codes on the CPU: that of the reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compll.backends.cpu import codes as cpu_codes
from compll.numerics import numbers
from tests.tiers import first_fast


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", first_fast([64, 8, 1024]))
@given(count=st.integers(0, 2500), seed=st.integers(0, 99))
def test_codes_of_selected_elements(bits, tile, count, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, count, np.uint8)
    wanted = numbers.pack(codes, bits, tile)
    out = np.full(len(wanted) + 2, 77, np.uint8)
    cpu_codes.pack_all(codes, out, 1, count, bits, tile)
    assert np.array_equal(out[1:-1], wanted)
    assert out[0] == out[-1] == 77
    found = np.zeros(count, np.uint8)
    cpu_codes.unpack_all(out, 1, found, count, bits, tile)
    assert np.array_equal(found, codes)
