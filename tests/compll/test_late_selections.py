"""Selections whose elements need a value of another walk than the one that selects them."""

import numpy as np
import pytest

import compll
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


def spec(folder, case):
    encode, payload, decode = case
    path = folder / "late.yaml"
    path.write_text(SPEC.format(encode=encode, payload=payload, decode=decode))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("case", LATE)
def test_a_selection_waits_for_what_its_elements_need(case, tmp_path, rng):
    path = spec(tmp_path, LATE[case])
    cpu, reference = (compll.compile(path, target) for target in ("cpu", "reference"))
    for n in (1, 65, 3000):
        states = [codec.init_state(n) for codec in (cpu, reference)]
        for step in range(2):
            x = rng.standard_normal(n).astype(np.float32)
            one, two = (
                codec.encode(x, state=state, step=step)
                for codec, state in zip((cpu, reference), states, strict=True)
            )
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(cpu.decode(one, n), reference.decode(two, n))
            np.testing.assert_array_equal(states[0]["residual"], states[1]["residual"])


@pytest.mark.parametrize("case", first_fast(["a level in the residual", "a size"]))
def test_and_so_it_does_on_a_device(case, tmp_path, rng):
    pieces_equal(spec(tmp_path, LATE[case]).read_text(), tmp_path, rng.standard_normal)


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


@pytest.mark.parametrize("case", first_fast(MASKS))
def test_a_selection_is_a_condition_anywhere(case, tmp_path, rng):
    path = tmp_path / "mask.yaml"
    path.write_text("name: mask" + MASKS[case])
    codecs = [compll.compile(path, target) for target in ("cpu", "reference")]
    for n in (1, 65, 3000):
        states = [codec.init_state(n) for codec in codecs]
        for step in range(3):
            x = rng.standard_normal(n).astype(np.float32)
            found = [c.encode(x, state=s, step=step) for c, s in zip(codecs, states, strict=True)]
            np.testing.assert_array_equal(*found)
            np.testing.assert_array_equal(*(c.decode(found[0], n) for c in codecs))
            for name in states[0]:
                np.testing.assert_array_equal(*(s[name] for s in states))


@pytest.mark.slow
@pytest.mark.parametrize("case", MASKS)
def test_and_so_it_is_on_a_device(case, tmp_path, rng):
    pieces_equal("name: mask" + MASKS[case], tmp_path, rng.standard_normal)
