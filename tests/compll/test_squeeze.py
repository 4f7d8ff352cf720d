"""Packing of selected elements, in order, with the processor's instruction and without."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import compll
from compll.backends.cpu import instructions, jit
from compll.backends.cpu.backend import TileKernels
from compll.runtime.batches import Encoding
from tests.compll.cuda_host.pieces import pieces_equal
from tests.compll.routines import PRINTERS, stream
from tests.tiers import first_fast

CHOSEN = """name: chosen
{group}
encode:
  kept: filter(g > 0)
  index: indices(kept)
  value: g[kept]
payload: {{index: "uint32[kept]", value: "float32[kept]"}}
decode: scatter(index, value)
"""


@pytest.mark.parametrize("group", first_fast(["", "group: 8", "group: 32"]))
@pytest.mark.parametrize("at_once", [True, False])
def test_selected_elements_are_put_together_in_order(at_once, group, tmp_path, monkeypatch):
    for name in ("usual", "folder", "spare"):
        monkeypatch.setattr(jit, name, lambda kind: tmp_path)
    monkeypatch.setattr(instructions, "COMPRESSES", at_once)
    path = tmp_path / "chosen.yaml"
    path.write_text(CHOSEN.format(group=group))
    codec = compll.compile(path, "reference")
    kernels = TileKernels(codec.module, codec.params)

    @given(st.lists(st.booleans(), min_size=1, max_size=2200), st.booleans())
    def ordered(bits, rare):
        hit = np.array(bits)
        hit[::2] &= not rare
        x = np.where(hit, np.arange(5, 5 + len(hit)), -1).astype(np.float32)
        table, at = np.array([[0, len(x), 0, 0, 0]]), np.zeros(1, np.int64)
        out = np.zeros(codec.payload_bytes(len(x)), np.uint8)
        given_ = {"seed": 1, "step": 0, "scale": 1.0, "writeback": False}
        kernels.encode_batch(x, table, out, at, None, Encoding(**given_))
        count = int(hit.sum())
        words = out[: 4 + 8 * count].view(np.uint32)
        assert words[0] == count
        assert np.array_equal(words[1 : 1 + count], np.flatnonzero(hit))
        assert np.array_equal(words[1 + count :].view(np.float32), x[hit])

    ordered()


@pytest.mark.parametrize("printer", PRINTERS)
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 1 << 21)), min_size=1, max_size=300))
def test_gaps_of_all_sizes_come_back(printer, gaps):
    places = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    count, n = len(gaps), int(places[-1]) + 1
    out = np.full(4 * count + 1, 201, np.uint8)
    end = stream("gaps", printer).store(places, n, out)
    assert out[end] == 201  # no byte is written behind them
    assert stream("gaps", printer).load(out[:end], count, n) == places.tolist()
    assert stream("gaps", printer).load(out[:end], count, n - 1) is None
    assert stream("gaps", printer).load(out[:end], count + 1, n) is None


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
def test_overflow_stays_in_the_state(tmp_path, rng, group, density):
    def values(n):
        x = rng.choice([0, 1, -2], n, p=[1 - density, density / 2, density / 2])
        return x + rng.uniform(-0.2, 0.2, n)

    pieces_equal(CUT.format(group=group), tmp_path, values, lengths=(5003, 33), on=["cpu"])
