"""What kernels compute by other ways than the reference, on every value or on the hard ones."""

import ctypes

import numpy as np
import pytest

from compll.backends import cuda_nvrtc, cuda_source, numbers, trits
from compll.backends.cuda_plans import prelude
from compll.backends.cuda_ranges import ALL, bounds
from compll.library import type_check
from tests.compll.cuda_host import build
from tests.compll.cuda_host.pieces import pieces_equal


def function(text, *args):
    """Run a C function over arrays; the first becomes what it leaves there."""
    path = build(f'#define GRADIENT 0\n{prelude()}\nextern "C" void run({text}')
    run = ctypes.CDLL(str(path)).run
    run.argtypes = [
        ctypes.c_void_p if isinstance(a, np.ndarray) else ctypes.c_longlong for a in args
    ]
    run(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in args))
    return args[0]


TRITS = """u8* out, u8* at, const u8* data) {
  for (int u = 0; u < 32; ++u) unpack_trits(data, out, 5 * 256, u, 32);
  for (int i = 0; i < 5 * 256; ++i) at[i] = (u8)trit_at(data, 5 * 256, i);
}"""


def test_trits_of_every_byte():
    data, at = np.arange(256, dtype=np.uint8), np.zeros(5 * 256, np.uint8)
    wanted = trits.unpack(data, 5 * 256, 5 * 256)
    np.testing.assert_array_equal(function(TRITS, np.zeros_like(at), at, data), wanted)
    np.testing.assert_array_equal(at, wanted)


GROUPED = """name: grouped
group: {group}
encode:
  q: where(g < 0, 0, where(g > 1, 2, 1))
  p: where(g < 1, 2, 0)
payload: {{q: "trit[n]", p: "trit[n]"}}
decode: q + 10 * p
"""


@pytest.mark.parametrize("group", [8, 64, 4096])
def test_trits_of_groups(group, tmp_path, rng):
    pieces_equal(GROUPED.format(group=group), tmp_path, rng.standard_normal)


def test_codes_of_large_groups_fit_shared_memory(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(GROUPED.format(group=4096))
    text = cuda_source.source(type_check(path, {})[0]).full()
    _, used = cuda_nvrtc.compiled(text, "sm_75")
    assert max(one.shared for one in used.values()) <= 48 * 1024


def floats(rng, count=1 << 16):
    """Of all exponents, signs and kinds, the first and last of each among them."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    exponents = np.arange(512, dtype=np.uint32) << np.uint32(23)
    ends = [exponents + np.uint32(f) for f in (0, 1, 2, 0x400000, 0x7FFFFE, 0x7FFFFF)]
    return np.concatenate([bits, *ends]).view(np.float32)


BY_EXPONENT = """float* quotient, i32* e, i32* bit, const float* x, const i64* n) {
  for (i64 i = 0; i < *n; ++i) {
    quotient[i] = mantissa(fabsf(x[i]), x[i]);
    e[i] = exponent(x[i]);
    bit[i] = bit_if_negative<7>(x[i]) + bit_if_negative<30>(x[i]) + bit_if_negative<0>(x[i]);
  }
}"""


def test_exponents_mantissas_and_signs(rng):
    x = floats(rng)
    e, bit = np.zeros(len(x), np.int32), np.zeros(len(x), np.int32)
    ours = function(BY_EXPONENT, np.zeros_like(x), e, bit, x, np.array([len(x)]))
    np.testing.assert_array_equal(e, numbers.exponent(x))
    np.testing.assert_array_equal(bit, np.where(x < 0, (1 << 30) + 129, 0))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(ours, abs(x) / numbers.exp2(numbers.exponent(x)))


BELOW = """i32* below, const float* y, const u64* keys, const i64* n) {
  for (i64 i = 0; i < *n; ++i) below[i] = uniform_below_less_one((u32)i, *keys, y[i]);
}"""


def test_draws_below_a_number_less_one(rng):
    """Equal to a draw and next to it, and everywhere."""
    keys = [int(k) for k in rng.integers(0, 1 << 32, 2)]
    n = 1 << 16
    x = numbers.hashed(np.arange(n, dtype=np.uint32), np.uint32(keys[0]), np.uint32(keys[1]))
    draw = (x >> np.uint32(9)).astype(np.float32) * np.float32(2.0**-23)
    same = draw + np.float32(1)
    anywhere = floats(rng)[:n]
    for y in (same, np.nextafter(same, np.float32(2)), np.nextafter(same, np.float32(0)), anywhere):
        given = np.array([keys[0] << 32 | keys[1]], np.uint64)
        ours = function(BELOW, np.zeros(n, np.int32), y, given, np.array([n]))
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(ours, draw < y - np.float32(1))


RANGES = """name: ranges
encode:
  e: exponent(g)
  a: clip(e + 3, 0, 127) + where(g < 0, 128, 0)
  b: (e & 63) - (g > 1)
  c: max(e, 5) - min(e, 2)
  d: 64 >> (e & 3)
  h: -e * 2
payload: {a: "uint8[n]", b: "uint8[n]", c: "uint8[n]", d: "uint8[n]", h: "uint8[n]"}
decode: a + b + c + d + h
"""


def test_ranges_of_whole_numbers(tmp_path, rng):
    path = tmp_path / "ranges.yaml"
    path.write_text(RANGES)
    module, _ = type_check(path, {})
    found = {f.name: bounds(f.expr) for f in module.fields}
    assert found == {"a": (0, 255), "b": (-1, 63), "c": (3, 255), "d": (8, 64), "h": ALL}
    pieces_equal(RANGES, tmp_path, lambda n: floats(rng)[:n])
