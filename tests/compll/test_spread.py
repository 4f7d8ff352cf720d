"""`spread` and uint16: INCEPTIONN against GRACE and plain NumPy, damaged payloads."""

from pathlib import Path

import numpy as np
import pytest

import compll
from tests.compll.cuda_host.pieces import decode_alike, pieces_equal
from tests.compll.wrong import refuses
from tests.tiers import first_fast

GOLDEN = np.load(Path(__file__).parent / "golden" / "inceptionn.npz")
#: the elements above their group's mean as float16, the others as one magnitude with a sign
BITMAP = """
name: bitmap
group: 64
params: {level: 1.0}
encode:
  size: abs(g)
  middle: level * mean(size)
  big: size > middle
  rest: sum(where(big, 0, size)) / max(count(not big), 1)
  negative: g < 0
  kept: filter(big)
  other: filter(not big)
  value: g[kept]
  fine: (size / middle * 15)[other]
payload:
  middle: float16
  rest: float32
  big: uint1[n]
  negative: bool[n]
  value: float16[kept]
  fine: uint4[other]
decode:
  low: spread(not big, (fine + 1) / 16) * rest
  out: where(big, spread(big, value), where(negative, -low, low))
feedback: error
"""


def published(x, bound):
    """Encode and decode by the bits of floats, as in the paper's Algorithm 2."""
    bits = x.view(np.uint32).astype(np.int64)
    exponent, fraction = (bits >> 23 & 255) - 127, (bits & (1 << 23) - 1) >> 1 | 1 << 22
    low = round(np.ceil(np.log10(bound / 2) - 1e-9))
    middle = low + -(low // 2)
    shifted = fraction >> np.clip(-exponent, 0, 40)
    fixed16, fixed8 = shifted >> 8, shifted >> 16
    sign = np.where(x < 0, -1, 1)
    y16 = sign * np.where(fixed16 == 0, 0.5, fixed16) / 2.0**14
    y8 = sign * np.where(fixed8 == 0, 0.5, fixed8) / 2.0**6
    y = np.where(exponent >= middle, y16, np.where(exponent >= low, y8, 0))
    return np.where(exponent >= 0, x, y).astype(np.float32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_inceptionn_is_that_of_grace(backend):
    codec = compll.compile("inceptionn", backend)
    payload = codec.encode(GOLDEN["x"])
    np.testing.assert_array_equal(codec.decode(payload, 2009), GOLDEN["y"])
    parts = sum(GOLDEN[f"c{k}"].nbytes for k in range(3))
    assert len(payload) == 12 + 503 + parts + 1  # theirs, three counts and the status


@pytest.mark.parametrize("bound", [2e-10, 2e-4, 2e-20, 0.2])
def test_inceptionn_is_the_papers(bound):
    codec = compll.compile("inceptionn", "cpu", bound=bound)
    rng = np.random.default_rng(0)
    for n in (1, 5, 1024, 3001):
        x = (rng.standard_normal(n) * np.exp2(rng.uniform(-30, 3, n))).astype(np.float32)
        x[n // 2 :] = np.exp2(np.floor(np.log2(np.abs(x[n // 2 :]))))
        x[::7] = 0
        np.testing.assert_array_equal(codec.decode(codec.encode(x), n), published(x, bound))


@pytest.mark.parametrize("name, n", [("inceptionn", 1), ("inceptionn", 5000)])
def test_the_bound_is_that_of_the_largest_form(name, n):
    codec = compll.compile(name, "cpu")
    payload = codec.encode(np.full(n, 3, np.float32))
    assert len(payload) == codec.payload_bytes(n) == 13 + -(-n // 4) + 4 * n


def compiled(tmp_path, backend, text=BITMAP):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return compll.compile(str(path), backend)


def test_bitmaps_of_groups(tmp_path):
    codec, n = compiled(tmp_path, "reference"), 1000
    x = np.random.default_rng(n).laplace(size=n).astype(np.float32)
    x[: n // 4] = 0
    y = codec.decode(codec.encode(x), n)
    for start in range(0, n, 64):
        part, there = x[start : start + 64], y[start : start + 64]
        big = np.abs(part) > np.float32(np.abs(part).mean()) * 1.0001
        np.testing.assert_array_equal(there[big], part[big].astype(np.float16))


@pytest.mark.parametrize("spec", first_fast(["inceptionn", "bitmap"]))
def test_tags_that_disagree_with_the_counts(tmp_path, spec):
    n, rng = 3000, np.random.default_rng(2)
    x = (rng.standard_normal(n) * np.exp2(rng.uniform(-12, 1, n))).astype(np.float32)
    codecs = [
        compiled(tmp_path, b) if spec == "bitmap" else compll.compile(spec, b)
        for b in ("cpu", "reference")
    ]
    payload, taken = codecs[0].encode(x), 0
    for place in rng.integers(0, len(payload), 300).tolist():
        damaged = payload.copy()
        damaged[place] ^= 1 << rng.integers(8)
        taken += decode_alike(codecs, damaged, n)
    assert 0 < taken < 280


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("spread(big, value)", "spread(negative, value)", "must have the condition by which"),
        ("spread(big, value)", "spread(big, rest)", "spread takes values of selected elements"),
        ("spread(big, value)", "spread(1, value)", "spread takes a condition of every element"),
        ("filter(big)", "filter(big, n / 2)", "'kept' is limited"),
        ("value: g[kept]", "value: spread(big, g[kept])", "spread belongs in decode"),
        ("big: size > middle", "big: floor(size)", "'big' may not hold the value that encode"),
        (
            "big: size > middle",
            "big: where(g > 0, 2, 0)",
            "'big' may not hold the value that encode",
        ),
    ],
)
def test_limits_of_spread(tmp_path, before, after, message):
    assert before in BITMAP
    refuses(BITMAP.replace(before, after), message, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "condition", ["where(g > 0, 1, 0)", "clip(exponent(g), 0, 3)", "exponent(g) & 3"]
)
def test_tags_that_fit_their_type(tmp_path, condition):
    text = f"""
name: tagged
encode:
  tag: {condition}
  kept: filter(tag == 1)
  value: g[kept]
payload: {{tag: "uint2[n]", value: "float32[kept]"}}
decode: spread(tag == 1, value)
"""
    cpu, reference = (compiled(tmp_path, b, text) for b in ("cpu", "reference"))
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float32) * 3
    payload = cpu.encode(x)
    assert np.array_equal(payload, reference.encode(x))
    y = cpu.decode(payload, 3000)
    assert 0 < np.count_nonzero(y) < 3000
    np.testing.assert_array_equal(y[y != 0], x[y != 0])


UINT16 = """
name: whole
GROUP
encode:
  one: max(abs(g)) * 1000
  some: filter(g > 0)
  index: indices(some)
  few: (g * 30000)[some]
  each: g * 30000
  bits: exponent(g)
payload: {one: uint16, each: "uint16[n]", bits: "uint16[n]", index: "gaps[some]",
  few: "uint16[some]"}
decode: DECODE
"""


def test_uint16_clamps_and_truncates(tmp_path):
    text = UINT16.replace("GROUP", "").replace("DECODE", "scatter(index, few)")
    codec = compiled(tmp_path, "reference", text)
    x = np.random.default_rng(0).standard_normal(2500).astype(np.float32) * 2
    x[5:8] = 0, 1e30, -1e30
    wanted = np.floor(np.clip(x * np.float32(30000), 0, 65535))
    np.testing.assert_array_equal(codec.decode(codec.encode(x), 2500), wanted)


MIXED = """
name: mixed
encode:
  tag: where(abs(g) > 1, 1, 0)
  kept: filter(tag > 0)
  few: hadamard(g, 16)[kept]
payload: {tag: "uint1[n]", few: "float32[kept]"}
decode: spread(tag > 0, few)
feedback: error
"""


def test_mixed_whole_arrays_equal_the_reference(tmp_path, rng):
    pieces_equal(MIXED, tmp_path, rng.standard_normal, lengths=(100,), on=["cpu"])
