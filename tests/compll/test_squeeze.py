"""Putting selected elements together and apart, with the processor's instructions and without."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

import compll
from compll.backends.cpu import compress_store as cpu_squeeze
from compll.backends.cpu import gaps as cpu_gaps
from compll.backends.cpu.text import SLACK
from tests.tiers import first_fast


@cache
def compiled(vectors, step):
    """(squeeze, spread) over arrays of a multiple of `step`, compiled with or without vectors."""
    place = getattr(cpu_squeeze, f"place{step}_1")
    with pytest.MonkeyPatch.context() as patch:
        if not vectors:
            patch.setattr(cpu_squeeze, "vectors", lambda target: False)

        @njit
        def squeeze(hit, x, values, first, places):
            return place(hit, first, 0, places, 0, x, values)

        @njit
        def spread(hit, values, x):
            cpu_squeeze.spread(hit, values, x)
            return cpu_squeeze.hits(hit)

        one, places = np.zeros(step, np.uint8), np.zeros(2 * step, np.int64)
        for dtype in (np.float32, np.int32):
            x, values = np.zeros(step, dtype), np.zeros(2 * step, dtype)
            squeeze(one, x, values, 0, places)
            spread(one, values, x)
    return squeeze, spread


@pytest.mark.parametrize("step", first_fast([64, 16]))
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@given(st.lists(st.booleans(), max_size=200), st.booleans(), st.integers(0, 1 << 40))
def test_squeezed_elements_are_those_selected_in_order(vectors, step, dtype, bits, rare, first):
    squeeze, spread = compiled(vectors, step)
    hit = np.zeros(-(-len(bits) // step) * step, np.uint8)
    hit[: len(bits)] = bits
    hit[::2] &= not rare
    x = np.arange(5, 5 + len(hit)).astype(dtype)
    values, places = np.zeros(len(hit) + SLACK, dtype), np.zeros(len(hit) + SLACK, np.int64)
    count = squeeze(hit, x, values, first, places)
    assert np.array_equal(values[:count], x[hit != 0])
    assert np.array_equal(places[:count], first + np.flatnonzero(hit))
    back = np.full(len(hit), 7, dtype)
    assert spread(hit, values, back) == count
    assert np.array_equal(back, np.where(hit, x, 0))


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 1 << 21)), min_size=1, max_size=300))
def test_gaps_of_all_sizes_come_back(gaps):
    places = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    count, n = len(gaps), int(places[-1]) + 1
    out = np.full(4 * count + 1, 201, np.uint8)
    end = cpu_gaps.store_gaps(places, count, out, 0, -1)
    assert out[end] == 201  # nothing is written behind them
    found = np.zeros(count, np.int64)
    assert cpu_gaps.load_gaps(out[:end], 0, -1, count, found) == end
    assert np.array_equal(found, places)
    assert cpu_gaps.check_gaps(out, 0, end, count, n)
    assert not cpu_gaps.check_gaps(out, 0, end, count, n - 1)
    assert not cpu_gaps.check_gaps(out, 0, end, count + 1, n)


CUT = """name: cut
params: {{most: 0.25}}
{group}
state: {{r: "float32[n]"}}
encode:
  x: g + r
  kept: filter(abs(x) > 0.5, ceil(n * most))
  i: indices(kept)
  v: x[kept]
payload: {{i: "gaps[kept]", v: "float32[kept]"}}
decode: scatter(i, v)
update: {{r: "where(kept, 0, x)"}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "group: 8", "group: 32", "group: 64"])
@pytest.mark.parametrize("density", [0.01, 0.2, 0.9])
def test_what_no_longer_fits_stays_in_the_state(tmp_path, rng, group, density):
    path = tmp_path / "cut.yaml"
    path.write_text(CUT.format(group=group))
    ours, wanted = (compll.compile(path, backend) for backend in ("cpu", "reference"))
    n = 5003
    states = ours.init_state(n), wanted.init_state(n)
    for step in range(3):
        x = rng.choice([0, 1, -2], n, p=[1 - density, density / 2, density / 2]).astype(np.float32)
        x += rng.uniform(-0.2, 0.2, n).astype(np.float32)
        pairs = zip((ours, wanted), states, strict=True)
        found = [codec.encode(x, state=state, step=step) for codec, state in pairs]
        assert np.array_equal(*found)
        assert np.array_equal(states[0]["r"], states[1]["r"])
