"""Numbers of the whole tensor in grouped specs, floats of 8 bits, and NVFP4 made of both."""

import numpy as np
import pytest

import compll
from compll.numerics.bits import FORMATS
from tests.compll.cuda_host.pieces import pieces_equal
from tests.compll.operators import computed
from tests.compll.wrong import refuses

DENSE = """
name: made
group: 16
encode:
  top: whole(max(abs(g)))
  middle: whole(mean(abs(g)))
  large: whole(count(abs(g) > middle))
  scale: max(abs(g)) / top + large / n
  q: floor((g / (scale * top) + 1) * 7.5 + 0.5)
payload: {top: float32, middle: float16, large: int32, scale: float8_e4m3, q: "uint4[n]"}
decode: (q / 7.5 - 1) * (scale * top) + 0 * (middle + large)
feedback: error
"""
SELECTED = """
name: made
group: 32
state: {u: "float32[n]"}
encode:
  v: g + u
  kept: filter(abs(v) > min(max(abs(v)), 2 * whole(mean(abs(v)))))
  index: indices(kept)
  value: v[kept]
payload: {index: "gaps[kept]", value: "float8_e4m3[kept]"}
decode: scatter(index, value)
update: {u: "where(kept, 0, v)"}
"""
GUARDED = """
name: made
group: 64
encode:
  top: whole(max(abs(g)))
  scale: top if top > 1 else whole(norm2(g))
  x: float8_e4m3(g / scale)
payload: {scale: float32, x: "float8_e4m3[n]"}
decode: x * scale
"""
SHAKEN = """
name: made
group: 64
encode:
  u: shared(-0.5, 0.5)
  top: max(abs(g))
  q: floor((g / top + 1) * 7.5 + 0.5 + u)
payload: {top: float32, q: "uint4[n]"}
decode: ((q - u) / 7.5 - 1) * top
feedback: error
"""
TEXTS = {"dense": DENSE, "selected": SELECTED, "guarded": GUARDED, "shaken": SHAKEN}


def values():
    """The 127 magnitudes of E4M3, by its definition."""
    return [
        (c & 7) / 8 * 2.0**-6 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7)
        for c in range(127)
    ]


def every_float():
    """Floats of every exponent and sign, with all that lie at, between and beside the values."""
    ends = np.array(values(), np.float32)
    middles = (ends[1:] + ends[:-1]) / 2
    at = np.concatenate([ends, middles, np.logspace(-45, 38, 400, dtype=np.float32)])
    around = [np.nextafter(at, np.float32(side)) for side in (0, 1e38)]
    positive = np.concatenate([at, *around, np.array([np.inf, np.nan], np.float32)])
    return np.concatenate([positive, -positive]).astype(np.float32)


def nearest(x):
    """The value of E4M3 that is nearest; of two the one with the even code."""
    if not np.isfinite(x):
        return np.nan
    known = values()
    far = [abs(min(abs(float(x)), 448) - v) for v in known]
    best = min(range(127), key=lambda code: (far[code], code % 2))
    return np.copysign(known[best], x)


def test_floats_of_8_bits_are_the_nearest():
    x = every_float()
    found = computed(x, "  y: float8_e4m3(g)", "{y: 'float32[n]'}")
    np.testing.assert_array_equal(found, np.array([nearest(v) for v in x], np.float32))
    assert np.array_equal(np.signbit(found), np.signbit(x))


def test_every_code_is_its_value():
    codes = np.arange(256, dtype=np.uint8)
    found = FORMATS["float8_e4m3"].value(codes.astype(np.int32))
    wanted = np.array([*values(), np.nan], np.float32)
    np.testing.assert_array_equal(found, np.concatenate([wanted, -wanted]))
    assert np.array_equal(FORMATS["float8_e4m3"].bits(found), codes)


def test_cuda_stores_and_rounds_the_same(tmp_path):
    text = (
        "name: made\nencode: {y: float8_e4m3(g), z: g}\n"
        "payload: {y: 'float32[n]', z: 'float8_e4m3[n]'}\ndecode: y + z\n"
    )
    x = every_float()
    pieces_equal(text, tmp_path, lambda n: np.resize(x[np.isfinite(x)], n))


@pytest.mark.parametrize("name", TEXTS)
def test_backends_agree(name, tmp_path, rng):
    pieces_equal(TEXTS[name], tmp_path, rng.standard_normal, on=("cpu", "cuda"))


def test_draws_that_ranks_share_are_the_same_in_decode(tmp_path, rng):
    """Also in a grouped spec: draws added and subtracted again leave only rounding errors."""
    path = tmp_path / "made.yaml"
    path.write_text(SHAKEN)
    codec, x = compll.compile(path), rng.uniform(-1, 1, 6400).astype(np.float32)
    assert codec.needs_step
    payload = codec.encode(x, step=7)
    right, wrong = (codec.decode(payload, 6400, step=step) for step in (7, 8))
    inside = np.abs(x) < 0.8
    assert np.abs(right - x)[inside].max() < 0.51 / 7.5
    assert np.abs(wrong - x)[inside].max() > 0.8 / 7.5


def test_one_number_travels_once(tmp_path):
    path = tmp_path / "made.yaml"
    path.write_text(DENSE)
    assert compll.compile(path, "reference").payload_bytes(160) == 4 + 2 + 4 + 10 + 80


def test_a_tensor_that_is_not_finite_is_seen_in_every_group():
    codec = compll.compile("nvfp4")
    for bad in (np.nan, np.inf):
        x = np.ones(64, np.float32)
        x[5] = bad
        assert not np.isfinite(codec.decode(codec.encode(x), 64)).any()


@pytest.mark.parametrize(
    ("encode", "decode", "message"),
    [
        ("whole(abs(g))", "g0", "whole gives one number of the tensor"),
        ("max(abs(g)) + 0 * whole(max(max(abs(g))))", "g0", "it reduces elements"),
        ("whole(kth_largest(abs(g), 3))", "g0", "looks at the whole tensor"),
        ("max(abs(g))", "whole(max(g0)) + g0", "whole belongs in encode"),
    ],
)
def test_a_whole_value_must_be_a_scalar_of_the_tensor(encode, decode, message, tmp_path):
    text = (
        f"name: made\ngroup: 16\nencode: {{g0: g, s: {encode!r}}}\n"
        f"payload: {{g0: 'float32[n]', s: float32}}\ndecode: {decode} + 0 * s\n"
    )
    refuses(text, message, tmp_path)


def e2m1(y):
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6; of two the one with the even code."""
    known = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    far = np.abs(np.abs(y)[..., None] - known) + 1e-9 * (np.arange(8) % 2)
    return np.copysign(known[far.argmin(-1)], y)


@pytest.mark.parametrize("size", [1.0, 3e-30, 1e30])
def test_nvfp4_is_the_published_one(size, rng):
    x = (rng.standard_normal((50, 16)) * size).astype(np.float32)
    x *= 10.0 ** rng.integers(-3, 1, (50, 1)).astype(np.float32)
    codec = compll.compile("nvfp4")
    y = codec.decode(codec.encode(x.reshape(-1)), x.size).reshape(x.shape)
    unit = np.float32(np.abs(x).max().astype(np.float64) / (448 * 6))
    tops = np.abs(x).max(-1, keepdims=True)
    scale = np.array([nearest(v) for v in (tops / np.float32(6) / unit).reshape(-1)])[:, None]
    both = (scale.astype(np.float32) * unit).astype(np.float32)
    wanted = e2m1((np.abs(x) / both).astype(np.float64)) * both
    np.testing.assert_allclose(y, np.copysign(wanted, x).astype(np.float32), rtol=1e-6)
