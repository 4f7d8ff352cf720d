"""Arithmetic that kernels do in another way than the reference, on every value or the hard ones."""

import ctypes

import numpy as np
import pytest

from compll.backends.cuda import nvrtc as cuda_nvrtc
from compll.backends.cuda import source as cuda_source
from compll.backends.cuda.plans import prelude
from compll.backends.reference import fields
from compll.numerics.bits import exponent
from compll.runtime.library import type_check
from tests.compll.cuda_host import build
from tests.compll.cuda_host.pieces import pieces_equal
from tests.tiers import first_fast


def function(text, *args):
    """Run a C function over arrays; returns the values that it leaves in the first."""
    path = build(f'#define GRADIENT 0\n{prelude()}\nextern "C" void run({text}')
    run = ctypes.CDLL(str(path)).run
    run.argtypes = [
        ctypes.c_void_p if isinstance(a, np.ndarray) else ctypes.c_longlong for a in args
    ]
    run(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in args))
    return args[0]


TRITS = """u8* at, const u8* data) {
  for (int i = 0; i < 5 * 256; ++i) at[i] = (u8)trit_at(data, 5 * 256, i);
}"""


def test_trits_of_every_byte():
    data, at = np.arange(256, dtype=np.uint8), np.zeros(5 * 256, np.uint8)
    wanted = fields.unpack_trits(data, 5 * 256, 5 * 256)
    np.testing.assert_array_equal(function(TRITS, at, data), wanted)


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
    """Floats of all exponents, signs and kinds, with the first and last of each."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    exponents = np.arange(512, dtype=np.uint32) << np.uint32(23)
    ends = [exponents + np.uint32(f) for f in (0, 1, 2, 0x400000, 0x7FFFFE, 0x7FFFFF)]
    return np.concatenate([bits, *ends]).view(np.float32)


BY_EXPONENT = """i32* e, const float* x, const i64* n) {
  for (i64 i = 0; i < *n; ++i) e[i] = op_exponent(x[i]);
}"""


def test_exponents(rng):
    x = floats(rng)
    ours = function(BY_EXPONENT, np.zeros(len(x), np.int32), x, np.array([len(x)]))
    np.testing.assert_array_equal(ours, exponent(x))


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
    pieces_equal(RANGES, tmp_path, lambda n: floats(rng)[:n])


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
    """Some tiles have only zeros, or one other value; others have values hard to divide."""

    def values(n):
        x = rng.standard_normal(n) * np.exp2(rng.integers(-8, 8, n))
        x[: n // 8] = 0
        x[rng.integers(0, n, 9)] = [1e-45, -1e-39, 1e-32, -1e-30, 3e38, -0.0, 1e20, 1e30, 65504]
        return x

    pieces_equal(
        DIVIDED.format(group=group, least=least), tmp_path, values, lengths=(8192, 1, 1031)
    )
