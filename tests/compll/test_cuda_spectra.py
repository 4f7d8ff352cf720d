"""Singular vectors by generated CUDA source on the CPU: true to the matrix, not bit for bit."""

import numpy as np
import pytest

import compll
from compll.backends.cuda import backend as cuda
from compll.backends.cuda import source as cuda_source
from compll.numerics import spectra
from compll.runtime.batches import Encoding
from compll.runtime.library import type_check
from tests.compll.conftest import VARIANTS
from tests.compll.cuda_host import HostDevice
from tests.compll.cuda_host.pieces import compiled
from tests.compll.test_cuda import gradients_of_16_bits, pieces, places
from tests.tiers import first_fast

PARTS = """
name: parts
params: {width: 12}
encode:
  h: ceil(n / width)
  r: min(h, width)
  m: matrix(g, width)
  left: left_vectors(m)
  size: singular_values(m)
  right: right_vectors(m)
payload: {left: "float32[h, r]", size: "float32[1, r]", right: "float32[width, r]"}
decode: flat((left * size) @ transpose(right))
"""
OPTIONS = {"seed": 5, "step": 1, "scale": 1.0, "writeback": False}


def found(values, folder, width, threads=64):
    """Left vectors, singular values, right vectors and decoded values of one piece."""
    device, reference = compiled(PARTS, folder, width=width)
    device.device.descending = threads == 64
    n = len(values)
    table, at = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
    out, y = np.zeros(reference.payload_bytes(n), np.uint8), np.zeros(n, np.float32)
    used = device.encode_batch(values, table, out, at, None, Encoding(**OPTIONS))
    device.decode_batch(out, table, at, used, y, add=False)
    h = -(-n // width)
    r = min(h, width)
    left, size, right = np.split(out[:-1].view(np.float32), np.cumsum([h * r, r]))
    return left.reshape(h, r), size, right.reshape(width, r), y


def near(a, b, size):
    return np.allclose(a, b, rtol=0, atol=3e-6 * max(size, 1e-30))


@pytest.mark.parametrize(
    "n, width", first_fast([(600, 12), (90, 40), (49, 7), (9, 1), (7, 9), (4500, 70)])
)
def test_they_are_those_of_the_matrix(n, width, tmp_path, rng):
    x = rng.standard_normal(n).astype(np.float32)
    left, size, right, y = found(x, tmp_path, width)
    m = np.zeros((len(left), width), np.float32)
    m.reshape(-1)[:n] = x
    wanted = spectra.spectrum(m)
    assert near(size, wanted.values[0], size[0])
    assert near(left * size @ right.T, m, size[0])
    assert near(left.T @ left, np.eye(len(size)), 1)
    assert near(right.T @ right, np.eye(len(size)), 1)
    assert near(y, x, size[0])


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_matrix_of_low_rank(scale, tmp_path, rng):
    m = scale * (rng.standard_normal((50, 3)) @ rng.standard_normal((3, 12)))
    left, size, right, _ = found(m.reshape(-1).astype(np.float32), tmp_path, 12)
    assert np.isfinite(left).all()
    assert near(left * size @ right.T, m, size[0])
    assert near(size[3:], 0, size[0])
    assert near(left[:, :3].T @ left[:, :3], np.eye(3), 1)


def test_zeros_and_non_finite_values(tmp_path):
    left, size, right, y = found(np.zeros(60, np.float32), tmp_path, 12)
    assert not size.any()
    assert not y.any()
    assert np.isfinite(left).all()
    assert np.isfinite(right).all()
    for bad in (np.nan, np.inf):
        x = np.ones(60, np.float32)
        x[17] = bad
        assert all(np.isnan(part).all() for part in found(x, tmp_path, 12))


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["float16", "bfloat16"])
def test_atomo_takes_16_bit_gradients(gradient, rng):
    module, known = type_check("atomo", {})
    device = cuda.Kernels(module, known, HostDevice, cuda_source.source(module, 64))
    reference, n = compll.compile("atomo", "reference"), 2000
    raw, wide = gradients_of_16_bits(rng, n, gradient)
    table, at = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
    out = np.zeros(reference.payload_bytes(n), np.uint8)
    device.encode_batch(raw, table, out, at, None, Encoding(**OPTIONS))
    wanted = reference.decode(reference.encode(wide, seed=5, step=1), n)
    assert near(reference.decode(out, n), wanted, np.abs(wanted).max())


@pytest.mark.parametrize("params", [{}, *VARIANTS["atomo"]])
def test_atomo_sends_what_the_reference_sends(params, rng):
    """The same triples are drawn; they differ only in the last bits and in common signs."""
    module, known = type_check("atomo", params)
    device = cuda.Kernels(module, known, HostDevice, cuda_source.source(module, 64))
    reference = compll.compile("atomo", "reference", **params)
    lengths = [0, 1, 33, 1000, 4100]
    table, total = pieces(lengths)
    at, room = places(reference, lengths, 1)
    x = rng.standard_normal(total).astype(np.float32)
    ours, theirs = x.copy(), x.copy()
    out, expected = np.zeros(room, np.uint8), np.zeros(room, np.uint8)
    options = OPTIONS | {"writeback": True}
    used = device.encode_batch(ours, table, out, at, None, Encoding(**options))
    wants = reference.encode_batch(theirs, table, expected, at, **options)
    assert used.tolist() == wants.tolist()
    assert near(ours, theirs, np.abs(theirs).max())
    decoded, want = np.zeros_like(x), np.zeros_like(x)
    device.decode_batch(expected, table, at, wants, decoded, add=False)
    reference.decode_batch(expected, table, at, wants, want)
    np.testing.assert_array_equal(decoded, want)  # decode is bit for bit
