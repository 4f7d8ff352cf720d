"""Golomb streams of the CUDA backend, on the CPU, against the reference."""

import numpy as np
import pytest

import compll
from tests.compll.cuda_host.pieces import compiled, decode_alike, pieces_equal
from tests.tiers import first_fast

STREAM = """name: stream
params: {t: {default: 1.0}, most: {default: 1.0}}
encode:
  kept: filter(abs(g) > t, floor(n * most))
  i: indices(kept)
  s: indices(kept)
  v: g[kept]
payload: {i: "golomb[kept]", s: "golomb[kept]", v: "float16[kept]"}
decode: scatter(s, v)
"""


@pytest.mark.parametrize(
    "t, most", first_fast([(1.0, 1.0), (-1.0, 1.0), (2.5, 1.0), (9.0, 1.0), (1.0, 1e-3)])
)
def test_streams_of_positions(t, most, tmp_path, rng):
    pieces_equal(STREAM, tmp_path, rng.standard_normal, t=t, most=most)


def test_a_stream_of_one_far_position(tmp_path):
    """Many ones in golomb's code, since the parameter fits equal distances."""
    at = np.isin(np.arange(20_000), [*range(5000, 5300), 19_999])
    pieces_equal(STREAM, tmp_path, lambda n: 2.0 * at[:n], lengths=(20_000,))


OF_TWO = """name: two
encode:
  d: drawn(max(1, floor(n / 4)))
  b: filter(g[d] >= 0)
  j: indices(b)
  k: indices(d)
  t: max(g)
payload: {j: "gaps[b]", k: "gaps[d]", t: float32}
decode: scatter(k, scatter(j, t))
"""


@pytest.mark.parametrize("storage", ["gaps", "golomb"])
def test_streams_of_two_lengths(storage, tmp_path, rng):
    """Positions among drawn ones, which are computed on each read, and these."""
    pieces_equal(OF_TWO.replace("gaps", storage), tmp_path, rng.standard_normal)


@pytest.mark.parametrize("share", first_fast([0.003, 0.5]))
def test_good_and_broken_streams_of_many_chunks(share, tmp_path, rng):
    text = STREAM.replace('i: "golomb[kept]", ', "").replace("  i: indices(kept)\n", "")
    codecs, n = compiled(text, tmp_path), 140_000 if share > 0.1 else 60_000
    good = codecs[1].encode(np.where(rng.random(n) < share, 2.0, 0.0).astype(np.float32))
    end = len(good) - 2 * int(good[:4].view("<u4")[0])
    assert decode_alike(codecs, good, n)
    taken = 0
    for turn in range(9):
        data = good.copy()
        first, last = ((8, 16), (8, end), (end - 3, end))[turn % 3]
        data[rng.integers(first, last)] ^= np.uint8(1 << rng.integers(8))
        taken += decode_alike(codecs, data, n)
    assert taken < 9


@pytest.mark.parametrize("length", [1, 30, 4000])
def test_streams_that_encode_never_makes(length, tmp_path):
    """With another parameter than encode's: refused, so the stream is no longer than encode's."""
    device, reference = compiled(STREAM.replace("scatter(s,", "scatter(i,"), tmp_path, most=0.01)
    n = 50_000
    x = np.zeros(n, np.float32)
    x[[100, length * 10]] = 2
    good = reference.encode(x)
    gaps = [100, length * 10 - 101] if length * 10 > 100 else [length * 10, 99 - length * 10]
    bits = [bit for gap in gaps for bit in [1] * gap + [0]]
    stream = np.concatenate([[0], np.packbits(bits, bitorder="little")]).astype(np.uint8)
    old = int(good[4:8].view("<u4")[0])
    data = np.concatenate([good[:12], stream, good[12 + old :]])
    data[4:8] = np.array([len(stream)], "<u4").view(np.uint8)
    cpu = compll.compile(tmp_path / "spec.yaml", "cpu", most=0.01)
    assert not decode_alike((device, reference, cpu), data, n)
