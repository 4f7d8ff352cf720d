"""exp, log, log2 and powers: right to a few units in the last place, and equal in both backends."""

import ctypes
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.backends.cpu.instructions import CALLED
from compll.numerics import bits
from tests.compll.cuda_host.pieces import pieces_equal
from tests.compll.routines import Library

ENDS = [
    0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, 1e-310, 2.2e-308, 1.7e308, 0.5, 2.0, 3.0,
    -2.0, -3.0, 745.0, -745.0, -746.0, 709.7, 710.0, -1000.0, 1000.0, 0.70710678, 0.7071068,
]  # fmt: skip
NUMBERS = st.one_of(st.sampled_from(ENDS), st.floats())


def values():
    rng = np.random.default_rng(0)
    wide = np.exp(rng.standard_normal(20_000) * 50)
    return np.concatenate([ENDS, rng.standard_normal(20_000) * 20, wide])


@pytest.mark.parametrize("name", ["exp", "log", "log2"])
def test_true_to_a_few_units_in_the_last_place(name):
    x = values()
    with np.errstate(all="ignore"):
        found, true = getattr(bits, name)(x), getattr(np, name)(x)
    assert np.array_equal(np.isnan(found), np.isnan(true))
    assert np.array_equal(np.isinf(found), np.isinf(true))
    normal = np.isfinite(true) & (np.abs(true) > 1e-300)
    found, true = found[normal], true[normal]
    assert (np.abs(found - true) <= 4 * np.spacing(np.abs(true))).all()


def test_powers():
    a, b = (m.ravel() for m in np.meshgrid(ENDS, [*ENDS, -5.0, 4.0, 0.3, -2.5]))
    with np.errstate(all="ignore"):
        found, true = bits.power(a, b), np.power(a, b)
    with np.errstate(all="ignore"):
        near = (found == true) | (np.abs(found - true) <= 1e-12 * np.abs(true))
    wrong = ~(near | (np.isnan(found) & np.isnan(true)))
    assert not wrong.any(), list(zip(a[wrong], b[wrong], found[wrong], true[wrong], strict=True))


@cache
def functions():
    """Functions of the CPU's kernels, on float64."""

    kinds = {name: [ctypes.c_double] * (1 + (name == "pow")) for name in CALLED}
    return Library("elementary", CALLED, kinds, ctypes.c_double)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_both_backends_give_the_same_bits(a, b):
    with np.errstate(all="ignore"):
        for name in ("exp", "log", "log2"):
            ours, theirs = functions().functions[name](a), getattr(bits, name)(np.float64(a))
            assert np.array_equal(ours, theirs, equal_nan=True), (name, a)
        ours, theirs = (
            functions().functions["pow"](a, b),
            bits.power(np.float64(a), np.float64(b)),
        )
        assert np.array_equal(ours, theirs, equal_nan=True), (a, b)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "group: 64\n"])
def test_specs_that_use_them_agree(group, tmp_path, rng):
    text = f"""name: elementary
{group}encode:
  size: abs(g)
  a: exp(g) + log(size) * log2(size)
  b: size ** 1.7 + 2 ** g + g ** 2 + size ** 0.5 + g ** 3
  s: exp(mean(g)) + log(mean(size)) ** 2 + mean(size) ** 0.3 + log2(max(size))
payload: {{a: "float32[n]", b: "float32[n]", s: float32}}
decode: (a + b) ** 2 * exp(s)
"""
    pieces_equal(text, tmp_path, rng.standard_normal, lengths=(20_011,), on=("cpu", "cuda"))


@pytest.mark.parametrize("power, times", [(2, 1), (3, 2), (4, 2), (1, 0)])
def test_small_powers_are_products(power, times, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"name: x\nencode: {{y: g ** {power}}}\npayload: {{y: 'float32[n]'}}\ndecode: y\n"
    )
    codec = compll.compile(path, "reference")
    x = np.array([3, -1.5, 0, 2**-60], np.float32)
    expected = {1: x, 2: x * x, 3: x * x * x, 4: (x * x) * (x * x)}[power]
    assert np.array_equal(codec.decode(codec.encode(x), 4), expected)
    assert str(codec.module.bindings["y"]).count("*") == times + (power == 4)
