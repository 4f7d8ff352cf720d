"""Lossless codecs, and bfloat16 by stochastic rounding."""

import numpy as np
import pytest

import compll
from compll.numerics import halves
from tests.compll.wrong import refuses

TARGETS = ["reference", "cpu"]


def floats(kind, rng):
    """float32 [5000] of many forms."""
    n = 5000
    if kind == "any bits":
        x = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
        return np.where(np.isfinite(x), x, np.float32(-0.0))
    scale = {"normal": 1.0, "denormal": 1e-40}.get(kind, 1.0)
    x = (rng.standard_normal(n) * scale).astype(np.float32)
    if kind == "zeros and spread":
        x = np.where(rng.random(n) < 0.4, 0, x * 10.0 ** rng.uniform(-30, 30, n)).astype(np.float32)
        x[::9] = -0.0
        x[640:1280] = 0
    return x


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["normal", "denormal", "any bits", "zeros and spread"])
def test_every_bit_comes_back(kind, target, rng):
    x = floats(kind, rng)
    short = halves.read((x.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
    for name, given in (("lossless", x), ("lossless_bf16", short)):
        codec = compll.compile(name, target)
        for n in (0, 1, 63, 64, 65, 5000):
            decoded = codec.decode(codec.encode(given[:n]), n)
            assert np.array_equal(decoded.view(np.uint32), given[:n].view(np.uint32)), (name, n)


def test_normal_numbers_take_fewer_bits(rng):
    x = rng.standard_normal(64_000).astype(np.float32)
    for name, bits in (("lossless", 27.5), ("lossless_bf16", 11.5)):
        assert len(compll.compile(name).encode(x)) * 8 / len(x) < bits


@pytest.mark.parametrize("target", TARGETS)
def test_rounded_at_random_to_a_neighbour(target, rng):
    x = floats("zeros and spread", rng)
    codec = compll.compile("bf16_sr", target)
    decoded = np.stack([codec.decode(codec.encode(x, seed=seed), len(x)) for seed in range(4)])
    lower = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    upper = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    assert ((decoded == lower) | (decoded == upper)).all()
    exact = lower == x
    assert (decoded[:, exact] == x[exact]).all()
    assert (decoded != decoded[0]).any()


@pytest.mark.parametrize("target", TARGETS)
def test_non_finite_and_largest_values_stay(target):
    x = np.array([np.inf, -np.inf, np.nan, 3.4028234e38, -3.4028234e38, -0.0], np.float32)
    codec = compll.compile("bf16_sr", target)
    for seed in range(8):
        got = codec.decode(codec.encode(x, seed=seed), len(x))
        assert np.array_equal(got[:3], x[:3], equal_nan=True)
        assert np.isfinite(got[3:]).all()
        assert np.signbit(got[5])


def test_bits_at_every_level(tmp_path):
    """Bits of elements, groups and whole tensors, to integers and back."""
    path = tmp_path / "bits.yaml"
    for group in ("", "group: 64\n"):
        path.write_text(
            f"name: bits\n{group}encode:\n  top: max(abs(g))\n"
            "  same: from_float_bits(float_bits(top)) == top\n"
            "  q: from_float_bits(float_bits(g) ^ -2147483648) * where(same, 1, 7)\n"
            "  e: (float_bits(top) >> 23) - 127 - exponent(top)\n"
            "payload: {q: 'float32[n]', e: int32}\ndecode: q + e\n"
        )
        x = np.random.default_rng(0).standard_normal(300).astype(np.float32)
        codecs = [compll.compile(path, target) for target in TARGETS]
        payloads = [codec.encode(x) for codec in codecs]
        assert np.array_equal(*payloads)
        assert np.array_equal(codecs[0].decode(payloads[1], 300), -x)


def test_bits_are_of_integers(tmp_path):
    text = "name: bits\nencode: {q: from_float_bits(g)}\npayload: {q: 'float32[n]'}\ndecode: q\n"
    refuses(text, "from_float_bits takes an integer", tmp_path)
