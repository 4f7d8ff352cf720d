"""What kernels compute by other ways than the reference, on every value or on the hard ones."""

import ctypes
import os

import numpy as np
import pytest

from compll.backends.cuda import nvrtc as cuda_nvrtc
from compll.backends.cuda import source as cuda_source
from compll.backends.cuda.plans import prelude
from compll.backends.reference import trits
from compll.numerics import numbers
from compll.passes.ranges import ALL, bounds
from compll.runtime.library import type_check
from tests.compll.cuda_host import build
from tests.compll.cuda_host.pieces import pieces_equal
from tests.tiers import first_fast


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


@pytest.mark.parametrize("group", first_fast([64, 8, 4096]))
def test_trits_of_groups(group, tmp_path, rng):
    pieces_equal(GROUPED.format(group=group), tmp_path, rng.standard_normal)


@pytest.mark.slow
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
  k: (64 >> e) & 127
payload: {a: "uint8[n]", b: "uint8[n]", c: "uint8[n]", d: "uint8[n]", h: "uint8[n]", k: "uint8[n]"}
decode: a + b + c + d + h + k
"""


def test_ranges_of_whole_numbers(tmp_path, rng):
    path = tmp_path / "ranges.yaml"
    path.write_text(RANGES)
    module, _ = type_check(path, {})
    found = {f.name: bounds(f.expr) for f in module.fields}
    wanted = {"a": (0, 255), "b": (-1, 63), "c": (3, 255), "d": (8, 64), "h": ALL, "k": (0, 127)}
    assert found == wanted
    pieces_equal(RANGES, tmp_path, lambda n: floats(rng)[:n])


# Quotients near to the middle of two floats: a * 2**24 or a * 2**25 is b more than an even multiple
# of b, and up to 16 more or less; above 6 it cannot matter (see [Note: quotients]). Inverses
# are those that the correction makes of any number within 3 units in the last place.
HARDEST = """i64* wrong, const i64* first, const i64* last) {
  for (i64 b = *first; b < *last; ++b) {
    const float by = (float)b, rounded = 1.0f / by;
    if (Hard().near_a_power(by)) continue;
    const int even = __builtin_ctzll(2 * b);
    const u64 odd = (u64)(2 * b) >> even, half = (odd + 1) / 2 % odd;
    for (int off = -3; off <= 3; ++off) {
      const float near = __int_as_float(__float_as_int(rounded) + off);
      const Divisor d = {by, better_inverse(by, near)};
      if (off && d.inverse == rounded) continue;
      u64 inverse = 1 % odd;
      for (int k = even; k < 24; ++k) inverse = inverse * half % odd;
      for (int bits = 24; bits <= 25; ++bits, inverse = inverse * half % odd)
        for (i64 more = b - 16; more <= b + 16; ++more) {
          if (more & ((1ll << even) - 1)) continue;
          const u64 low = bits == 24 ? b : 1 << 23, high = bits == 24 ? 1 << 24 : b;
          u64 a = (u64)(more >> even) % odd * inverse % odd;
          if (a < low) a += (low - a + odd - 1) / odd * odd;
          for (; a < high; a += odd) {
            ++wrong[1];
            wrong[0] += quotient<true>((float)a, d) != (float)a / by;
          }
        }
    }
  }
}"""


def test_hardest_quotients():
    """Of some divisors, the first and the last of all among them; COMPLL_EXHAUSTIVE=1 takes all."""
    step = 1 << 17
    size = step if os.environ.get("COMPLL_EXHAUSTIVE") == "1" else 1 << 12
    wrong = np.zeros(2, np.int64)
    for begin in range(1 << 23, 1 << 24, step):
        for first in {begin, begin + step - size}:
            function(HARDEST, wrong, np.array([first]), np.array([first + size]))
    assert wrong[0] == 0
    assert wrong[1] > 11 * 64 * size


QUOTIENTS = """float* ours, u8* hard, const float* a, const float* b, const i64* n) {
  for (i64 i = 0; i < *n; ++i) {
    Hard found;
    const Divisor d = divisor(b[i]);
    found.by(d);
    found.number(a[i]);
    hard[i] = found.found();
    ours[i] = quotient<true>(a[i], d);
  }
}"""


def test_quotients_are_rounded_unless_they_are_hard(rng):
    near = rng.standard_normal((2, 1 << 20)).astype(np.float32)
    zero, one = np.array([0.0, -0.0], np.float32), np.ones(2, np.float32)
    a = np.concatenate([floats(rng, 1 << 20), near[0], zero])
    b = np.concatenate([rng.permutation(floats(rng, 1 << 20)), near[1], one])
    hard = np.zeros(len(a), np.uint8)
    ours = function(QUOTIENTS, np.zeros(len(a), np.float32), hard, a, b, np.array([len(a)]))
    with np.errstate(all="ignore"):
        wanted = a / b
    soft = hard == 0
    np.testing.assert_array_equal(ours[soft].view(np.uint32), wanted[soft].view(np.uint32))
    assert not hard[-2:].any()
    positive = (b > 1e-30) & (b < 1e6) & (abs(a) > 1e-30) & (abs(wanted) < 1e30)
    assert not hard[positive & (b.view(np.uint32) & 0x7FFFFF <= 0x7FFFF8)].any()
    assert hard[~np.isfinite(wanted)].all()


DIVIDED = """name: divided
{group}
encode:
  top: max(abs(g)) + {least}
  q: round((g / top + abs(g - 3) / top) * 127 + g / 3) + 128
  y: g / (top + 2)
payload: {{top: float32, q: "uint8[n]", y: "float32[n]"}}
decode: (q - 128) * top / 127 + y
feedback: error
"""


@pytest.mark.parametrize("group", first_fast(["group: 128", "", "group: 8", "group: 1024"]))
@pytest.mark.parametrize("least", ["1e-35", "0"])
def test_tiles_with_numbers_beyond(group, least, tmp_path, rng):
    """Of some tiles all elements are zeros, or all but one; others hold what is hard to divide."""

    def values(n):
        x = rng.standard_normal(n) * np.exp2(rng.integers(-8, 8, n))
        x[: n // 8] = 0
        x[rng.integers(0, n, 9)] = [1e-45, -1e-39, 1e-32, -1e-30, 3e38, -0.0, 1e20, 1e30, 65504]
        return x

    pieces_equal(
        DIVIDED.format(group=group, least=least), tmp_path, values, lengths=(8192, 1, 1031)
    )


COUNTED = """i32* count, float* least, float* most, float* half, const float* x, const i64* n) {
  for (i64 i = 0; i < *n; ++i) {
    count[i] = how_many(below(x[i], 1e-15f * 1.2379400392853803e27f),
                        below(x[i], 1.0f * 1.2379400392853803e27f), below(x[i], BOUND));
    least[i] = f_min_number(x[i], 7.5f);
    most[i] = f_max_number(x[i], 0.0f);
    half[i] = over_power(x[i], 64.0f) + over_power(x[i], 1073741824.0f);
  }
}"""


@pytest.mark.parametrize("bound", [1e-6, 0.1, 3.0, 9e8])
def test_counts_of_comparisons(bound, rng):
    bound = np.float32(bound)
    near = np.array([1e-15, 1, bound], np.float32)
    ends = [np.nextafter(near, np.float32(to)) for to in (-9, 9e9)]
    x = np.concatenate([floats(rng), near, *ends])
    parts = [np.zeros(len(x), np.float32) for _ in range(3)]
    text = COUNTED.replace("BOUND", f"(float){float(bound) * 2.0**90!r}")
    ours = function(text, np.zeros(len(x), np.int32), *parts, x, np.array([len(x)]))
    with np.errstate(all="ignore"):
        wanted = (x < near[0]).astype(int) + (x < near[1]) + (x < near[2])
        np.testing.assert_array_equal(parts[0], np.where(x < 7.5, x, np.float32(7.5)))
        np.testing.assert_array_equal(parts[1], np.where(x > 0, x, np.float32(0)))
        powers = x / np.float32(64) + x / np.float32(2**30)
        np.testing.assert_array_equal(parts[2], powers)
    np.testing.assert_array_equal(ours, wanted)
