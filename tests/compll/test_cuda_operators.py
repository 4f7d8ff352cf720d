"""Operators of the CUDA backend beyond what specs/ use, on the CPU, against the reference."""

import numpy as np
import pytest

import compll
from compll.backends import cuda_source
from compll.backends.cuda import Kernels
from compll.library import type_check
from tests.compll.cuda_host import HostDevice

SIZES = (1, 2, 31, 1024, 0, 1025, 5000)
SEARCHES = """name: searches
encode:
  a: abs(g)
  low: bisect(a, 0, max(a), n / 4, n / 3, {tries})
  high: adjust(a, mean(a), n / 9, n / 8, 0.9, 1.1, {tries})
  q: where(a >= low, 1, 0)
payload: {{low: float32, high: float32, q: "uint[1][n]"}}
decode: q * low
"""


def pieces_equal(text, folder, values, step=3, **params):
    """Whether a batch of pieces of these sizes is encoded and decoded as by the reference."""
    path = folder / "spec.yaml"
    path.write_text(text)
    module, known = type_check(path, params)
    device = Kernels(module, known, HostDevice, cuda_source.source(module, 64))
    reference = compll.compile(path, "reference", **params)
    starts = np.cumsum([0, *SIZES[:-1]])
    table = np.array([[s, n, i, 0, s] for i, (s, n) in enumerate(zip(starts, SIZES, strict=True))])
    sizes = [reference.payload_bytes(n) for n in SIZES]
    at = np.cumsum([1, *sizes[:-1]]).astype(np.int64)
    options = {"seed": 2, "step": step, "scale": 1, "writeback": False}
    x = values(sum(SIZES)).astype(np.float32)
    for _ in range(2):  # the second finds what the first left in scratch memory
        ours, theirs = np.zeros(sum(sizes) + 1, np.uint8), np.zeros(sum(sizes) + 1, np.uint8)
        used = device.encode_batch(x.copy(), table, ours, at, None, **options)
        wants = reference.encode_batch(x.copy(), table, theirs, at, **options)
        assert used.tolist() == wants.tolist()
        np.testing.assert_array_equal(ours, theirs)
        got, want = np.zeros_like(x), np.zeros_like(x)
        device.decode_batch(ours, table, at, used, got, add=False)
        reference.decode_batch(theirs, table, at, wants, want, add=False)
        np.testing.assert_array_equal(got, want)
        x = x[::-1].copy()


@pytest.mark.parametrize("tries", ["0", "7", "step", "2 + 200 * mean(a)", "-mean(a)"])
def test_numbers_of_tries(tries, tmp_path, rng):
    pieces_equal(SEARCHES.format(tries=tries), tmp_path, rng.standard_normal)


GAMMA = """name: gamma
encode:
  top: max(g)
  wide: gamma_above(exp(3 * top), 0.01 * abs(mean(g)))
  narrow: gamma_above(exp(-2 * top), clip(abs(min(g)) / 3, 0, 1))
  near: gamma_above(1 + abs(mean(g)) / 10, 0.25)
  q: sign(g) + 1
payload: {wide: float32, narrow: float32, near: float32, q: "trit[n]"}
decode: q * narrow + wide + near
"""


def test_gamma_quantiles(tmp_path, rng):
    pieces_equal(GAMMA, tmp_path, rng.standard_normal)
    pieces_equal(GAMMA, tmp_path, lambda n: 1e-3 * rng.standard_normal(n))
    pieces_equal(GAMMA, tmp_path, lambda n: np.full(n, np.nan))
