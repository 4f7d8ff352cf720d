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


def test_a_walk_that_needs_the_selection_is_told(tmp_path):
    path = spec(tmp_path, ("m: mean(abs(a - mean(a[kept])))", "", "where(neg, -m, m)"))
    compll.compile(path, "reference")
    with pytest.raises(compll.SpecError, match="depends on 'kept', after which") as caught:
        compll.compile(path, "cpu")
    (found,) = caught.value.diagnostics
    assert "mean(x, c)" in found.hint
