"""Operators of the CUDA backend that specs/ does not use, on the CPU, against the reference."""

import itertools
import re

import numpy as np
import pytest

from compll.backends.cuda import nvrtc as cuda_nvrtc
from tests.compll.cuda_host.pieces import compiled, decode_alike, pieces_equal
from tests.compll.test_spread import BITMAP, UINT16
from tests.tiers import first_fast

SEARCHES = """name: searches
encode:
  a: abs(g)
  low: bisect(a, 0, max(a), n / 4, n / 3, {tries})
  high: adjust(a, mean(a), n / 9, n / 8, 0.9, 1.1, {tries})
  q: where(a >= low, 1, 0)
payload: {{low: float32, high: float32, q: "uint[1][n]"}}
decode: q * low
"""


@pytest.mark.parametrize("tries", first_fast(["2 + 200 * mean(a)", "0", "7", "step", "-mean(a)"]))
def test_numbers_of_tries(tries, tmp_path, rng):
    pieces_equal(SEARCHES.format(tries=tries), tmp_path, rng.standard_normal)


RUNS = """name: two
encode:
  s: max(abs(g)) + 1e-30
  a: round(g / s) + 1
  b: 1 if abs(g) < s else 2
  bits: g > 0
payload: {a: "runs[n]", b: "runs[n]", s: float32, bits: "uint[1][n]"}
decode: (a - 1) * s * b + bits
"""


def sparse(rng, share):
    """Mostly zeros, in runs of all lengths; blocks of 2048 bytes of trits are 10240 elements."""

    def values(n):
        lengths = rng.geometric(share, n) * rng.integers(1, 40, n)
        x = np.zeros(n)
        x[np.minimum(np.cumsum(lengths), n - 1)] = rng.choice([-1.0, 1.0], n)
        return x

    return values


@pytest.mark.parametrize("share", [0.9, 0.05, 0.004, 0.00001])
def test_runs_cross_blocks(share, tmp_path, rng):
    sizes = (30_001, 5, 0, 10_240, 21_000)
    pieces_equal(RUNS, tmp_path, sparse(rng, share), lengths=sizes)


def test_runs_of_a_status_byte(tmp_path):
    pieces_equal(RUNS, tmp_path, lambda n: np.where(np.arange(n) % 999, 0, np.nan))


def test_broken_runs(tmp_path, rng):
    """Lengths in the header and bytes that change the values of the runs."""
    codecs, n = compiled(RUNS, tmp_path), 30_001
    good = codecs[1].encode(sparse(rng, 0.02)(n).astype(np.float32))
    taken = 0
    for turn in range(30):
        data = good.copy()
        first = 0 if turn % 5 == 0 else len(data) // 4
        places = rng.integers(first, 8 if first == 0 else len(data), 2)
        data[places] = data[places[::-1]] if turn % 2 else rng.integers(0, 256, 2)
        taken += decode_alike(codecs, data, n)
    assert 5 < taken < 30


TABLES = """name: tabled
state: {s: "float32[n]"}
encode:
  edges: quantiles(g + s, 8)
  i: bucket(g + s, edges)
  shares: sum_by(i, where(g > 0, 1, 0), 16) / max(1, sum_by(i, 1, 16))
  y: lookup(shares, i - 3) + lookup(edges, 99) + bucket(sum(g), edges)
  kept: filter(bucket(g, edges) == 7)
  index: indices(kept)
  value: lookup(edges, bucket(g, edges) - 2)[kept]
payload:
  edges: "float32[7]"
  shares: "float32[1, 16]"
  index: gaps[kept]
  value: float32[kept]
decode: scatter(index, value)
update:
  s: y - lookup(edges, i)
"""
MEANS = """name: means
params: {q: 4096}
encode:
  edges: quantiles(g, q)
  means: sum_by(bucket(g, edges) - 1, g + random(0, 1), q)
  i: where(g > lookup(edges, 3), 1, 0)
payload: {means: "float32[1, q]", edges: "float32[q - 1]", i: "uint1[n]"}
decode: lookup(means, 7 * i) + lookup(edges, i)
"""


def test_tables_at_every_place(tmp_path, rng):
    pieces_equal(TABLES, tmp_path, rng.standard_normal)


REPEATED = """name: repeated
encode:
  c: sum_by(bucket(g, quantiles(g, 4)), g, 4)
  i: bucket(g, quantiles(g, 4))
  near: where(abs(g - lookup(c, i + 1)) < abs(g - lookup(c, i)), min(i + 1, 3), i)
  q: where(abs(g - lookup(c, i - 1)) < abs(g - lookup(c, near)), max(i - 1, 0), near)
  means: sum_by(q, g, 4)
payload: {means: "float32[1, 4]", q: "uint2[n]"}
decode: lookup(means, q)
"""


@pytest.mark.parametrize("feedback", ["", "feedback: error\n"])
def test_tables_in_large_expressions_keep_their_names(feedback, tmp_path):
    """A table that was read more than once became a float in the source, which did not compile."""
    device, _ = compiled(REPEATED + feedback, tmp_path)
    assert not re.search(r"const float \w+ = table", device.source.full())


RANKED = """name: ranked
encode:
  a: abs(g)
  half: kth_largest(a, ceil(n / 2))
  edges: quantiles(a, 16)
  kept: top(a, ceil(n / 9))
  index: indices(kept)
  value: (g * lookup(edges, 3) + half)[kept]
payload: {edges: "float32[15]", index: "golomb[kept]", value: "float32[kept]"}
decode: scatter(index, value)
"""


def test_quantiles_beside_other_searches(tmp_path, rng):
    """All of these searches count elements by their bits."""
    pieces_equal(RANKED, tmp_path, rng.standard_normal, on=("cpu", "cuda"))


@pytest.mark.parametrize("q", first_fast([520, 2, 100]))
def test_tables_of_every_size(q, tmp_path, rng):
    """With many equal elements, zeros and infinities."""
    x = rng.standard_normal(12_000).astype(np.float32)
    x[::7], x[1::9], x[5] = 0.25, -0.0, -np.inf
    text = MEANS.replace("4096", str(q))
    pieces_equal(text, tmp_path, lambda n: x[:n], lengths=(9001, 0, 1, 2500))


@pytest.mark.slow
@pytest.mark.parametrize("q", [2, 100, 4096])
def test_tables_of_every_size_become_cubins(q, tmp_path):
    device, _ = compiled(MEANS.replace("4096", str(q)), tmp_path)
    assert cuda_nvrtc.cubin(device.source.full(), "sm_90")


SELECTING = """name: selecting
encode:
  y: g
  high: filter(g > 0, n)
  low: filter(abs(g) > 1, n)
  i: indices(high)
  j: indices(low)
  v: g[high]
  w: g[low]
payload:
  {i: "gaps[high]", j: "gaps[low]", v: "float32[high]", w: "float32[low]", y: "float16[n]"}
decode: scatter(i, v)
"""


@pytest.mark.parametrize(
    "old, new", [("decode: scatter(i, v)", "decode: y"), ("> 1", "> mean(g[high])")]
)
def test_several_selections(old, new, tmp_path, rng):
    """Decode needs neither selection, or one of them needs a mean of the other."""
    pieces_equal(SELECTING.replace(old, new), tmp_path, rng.standard_normal)


TAGGED = BITMAP.replace("group: 64", "").replace("middle: float16", "middle: float32")


@pytest.mark.parametrize("text", [BITMAP, TAGGED], ids=["grouped", "whole"])
@pytest.mark.parametrize(
    "on, level", first_fast(itertools.product(("cuda", "cpu"), (1.0, 0.0, 1e9)))
)
def test_spread_crosses_blocks(text, on, level, tmp_path, rng):
    sizes = (7001, 1, 0, 2048, 4100)
    pieces_equal(text, tmp_path, rng.standard_normal, lengths=sizes, on=[on], level=level)


STEPS = """name: steps
group: {group}
encode:
  total: sum(abs(g))
  top: max(abs(g))
  q: max(0, min({most}, floor(3 * g / top + random(0, 1)) + 3))
payload: {{total: float32, top: bfloat16, q: "uint[{bits}][n]"}}
decode: (q - 3) * total * top
"""


LARGE = [(64, 2), (128, 4), (256, 1), (512, 8), (2048, 2)]


@pytest.mark.parametrize(
    "group, bits",
    first_fast([(8, 4), (8, 1), (16, 2), (16, 8), (32, 1), *LARGE]),
)
def test_groups_and_codes_of_every_size(group, bits, tmp_path, rng):
    text = STEPS.format(group=group, bits=bits, most=min(6, 2**bits - 1))
    pieces_equal(text, tmp_path, rng.standard_normal, writeback=bits > 1)


@pytest.mark.parametrize(
    "on, group", first_fast(itertools.product(("cuda", "cpu"), ("", "group: 32")))
)
@pytest.mark.parametrize("decode", ["each + bits * 65536 + one", "scatter(index, few)"])
def test_uint16(on, group, decode, tmp_path, rng):
    text = UINT16.replace("GROUP", group).replace("DECODE", decode)
    if "scatter" not in decode:  # only scatter puts selected elements back
        fields = ("some:", "index:", "few:", "payload:")
        lines = [line for line in text.split("\n") if not line.strip().startswith(fields)]
        lines.append('payload: {one: uint16, each: "uint16[n]", bits: "uint16[n]"}')
        text = "\n".join(lines)
    pieces_equal(text, tmp_path, lambda n: 2 * rng.standard_normal(n), on=[on])


POWERS = """name: powers
group: 32
state: {{s: "float32[n]"}}
encode:
  k: exponent(max(abs(g)))
  own: exponent(g)
  x: g / exp2(k) + g / exp2(k + {more}) + g / exp2(clip(own, 0, 3)) + g / exp2(own)
payload: {{x: "float32[n]"}}
decode: x
update: {{s: s + g}}
"""


@pytest.mark.parametrize("more", [0, 250, -250])
def test_a_quotient_by_a_power_of_two_is_exact(more, tmp_path, rng):
    """A product takes its place, also where the power or its inverse is 0, denormal or infinite."""

    def values(n):
        x = np.ldexp(rng.uniform(-2, 2, n), np.repeat(rng.integers(-150, 128, n // 32 + 1), 32)[:n])
        return np.where(rng.random(n) < 0.01, rng.choice([np.inf, np.nan, 0.0], n), x)

    pieces_equal(POWERS.format(more=more), tmp_path, values, on=("cpu", "cuda"))
