"""Selections whose elements need a value of another walk than the one that selects them."""

import itertools

import pytest

from tests.compll.cuda_host.pieces import pieces_equal
from tests.tiers import first_fast

SPEC = """
name: late
encode:
  a: abs(g)
  t: mean(a)
  kept: filter(a >= t)
  {encode}
  i: indices(kept)
  neg: (g < 0)[kept]
payload:
  m: float32
  i: gaps[kept]
  neg: uint1[kept]
  {payload}
decode: scatter(i, {decode})
feedback: error
"""
#: further parts of encode, payload and decode
LATE = {
    "a level in the residual": ("m: mean(a, a >= t)", "", "where(neg, -m, m)"),
    "a number that is only sent": ("m: std(a, a < t)", "t: float32", "where(neg, -t, t)"),
    "values": (
        "m: mean(a, a >= t)\n  v: (a / m)[kept]",
        "v: float16[kept]",
        "where(neg, -v, v) * m",
    ),
    "a size": (
        "m: sum(a, a < t) / max(1, n - count(kept))\n  v: (a - m)[kept]",
        "v: float32[kept]",
        "where(neg, -v - m, v + m)",
    ),
    "a walk over all elements": ("m: mean(abs(a - mean(a[kept])))", "", "where(neg, -m, m)"),
    "two selections": (
        "m: mean(a, a >= t)\n  high: filter(a >= m)\n  w: g[high]",
        "w: bfloat16[high]",
        "where(neg, -m, m)",
    ),
}


@pytest.mark.parametrize("on, case", first_fast(itertools.product(("cuda", "cpu"), LATE)))
def test_a_selection_waits_for_what_its_elements_need(on, case, tmp_path, rng):
    encode, payload, decode = LATE[case]
    text = SPEC.format(encode=encode, payload=payload, decode=decode)
    pieces_equal(text, tmp_path, rng.standard_normal, on=[on])


#: selections as conditions anywhere, and states that depend on selected elements
MASKS = {
    "a part of a state's update": """
state: {m: "float32[n]"}
encode:
  v: m + g
  kept: top(abs(v), 3)
  index: indices(kept)
  value: v[kept]
payload: {index: "uint32[kept]", value: "float32[kept]"}
decode: scatter(index, value)
update: {m: "where(kept, 0, v) * 0.9"}
""",
    "a field": """
encode:
  kept: filter(g > 0.5, n)
  index: indices(kept)
  twice: where(kept, g, 0) * 2
payload: {twice: "float32[n]", index: "int32[kept]"}
decode: twice
feedback: error
""",
    "states of totals of selected elements": """
state: {r: "float32[n]", m: "float32[n]"}
encode:
  x: g + r
  a: abs(x)
  kept: filter(a >= 2 * mean(a), n)
  high: filter(x > mean(a[kept]), n)
  index: indices(kept)
  value: x[kept]
  w: m[high]
  q: (x - mean(x[high]))[kept]
payload: {index: "gaps[kept]", value: "float32[kept]", w: "float32[high]", q: "float16[kept]"}
decode: scatter(index, value)
update:
  r: where(kept, x - mean(x[kept]), x + mean(x[kept]))
  m: where(high, r * 2, m)
""",
    "a state that a later walk reads": """
state: {r: "float32[n]"}
encode:
  x: g + r
  a: abs(x)
  kept: filter(a >= 2 * mean(a), n)
  index: indices(kept)
  value: x[kept]
  z: mean(r - mean(value))
payload: {index: "gaps[kept]", value: "float32[kept]", z: "float32"}
decode: scatter(index, value)
update: {r: "where(kept, x * 0.5, x)"}
""",
    "states that others' new values read": """
state: {r: "float32[n]", m: "float32[n]"}
encode:
  x: g + r
  a: abs(x)
  kept: filter(a >= 2 * mean(a), n)
  high: filter(x > mean(a[kept]), n)
  index: indices(kept)
  value: x[kept]
  w: m[high]
payload: {index: "gaps[kept]", value: "float32[kept]", w: "float32[high]"}
decode: scatter(index, value)
update:
  r: where(kept, m, x)
  m: where(high, r * count(kept), m + r)
""",
    "in groups": """
group: 32
state: {r: "float32[n]"}
encode:
  x: g + r
  kept: filter(abs(x) > 0.5 * max(abs(x)), n)
  index: indices(kept)
  value: x[kept]
payload: {index: "gaps[kept]", value: "float32[kept]"}
decode: scatter(index, value)
update: {r: "where(kept, x * 0.25, x) * 2"}
""",
}


@pytest.mark.parametrize("on, case", first_fast(itertools.product(("cpu", "cuda"), MASKS)))
def test_a_selection_is_a_condition_anywhere(on, case, tmp_path, rng):
    pieces_equal("name: mask" + MASKS[case], tmp_path, rng.standard_normal, on=[on])
