"""Methods against independent implementations, on the same vectors."""

from pathlib import Path

import numpy as np
import pytest

import compll
from tests.tiers import first_fast

FOLDER = Path(__file__).parent / "golden"
INPUTS, MORE = np.load(FOLDER / "published.npz"), np.load(FOLDER / "more.npz")


def vectors(method):
    """Names of the inputs for which a method's results are known."""
    return sorted({k.split("/")[1] for k in MORE if k.startswith(f"{method}/")})


def through(name, x, **params):
    codec = compll.compile(name, "cpu", **params)
    return codec.decode(codec.encode(x), len(x))


@pytest.mark.parametrize("spec", ["onebit_sgd", "signsgd"])
def test_signs(spec):
    for vector in vectors(spec):
        x, wanted = INPUTS[f"input/{vector}"], MORE[f"{spec}/{vector}/decoded"]
        np.testing.assert_allclose(through(spec, x), wanted, rtol=1e-5)


@pytest.mark.parametrize("vector", vectors("signum_0.9"))
def test_signum_follows_its_momentum(vector):
    held = {k.split("/")[2]: MORE[k] for k in MORE if k.startswith(f"signum_0.9/{vector}/")}
    codec = compll.compile("signum", "cpu", momentum=0.9)
    state = codec.init_state(len(held["input0"]))
    for step in range(5):
        payload = codec.encode(held[f"input{step}"], state=state, step=step)
        y = codec.decode(payload, len(held["input0"]))
        differ = y != held[f"decoded{step}"]
        assert differ.mean() < 1e-3  # momenta that cancel to a rounding error


def test_efsignsgd():
    x, y = MORE["grace_efsignsgd/x"], MORE["grace_efsignsgd/y"]
    np.testing.assert_allclose(through("efsignsgd", x), y, rtol=1e-5)
    halved = through("efsignsgd", x, lr=0.5)
    np.testing.assert_allclose(halved, y, rtol=1e-5)  # in units of the gradient again


def test_natural():
    x, theirs = MORE["grace_natural/x"], MORE["grace_natural/y"]
    codec = compll.compile("natural", "cpu")
    assert (through("natural", x)[x == 0] == 0).all()
    x, theirs = x[x != 0], theirs[x != 0]
    low = np.exp2(np.floor(np.log2(np.abs(x))))
    for step in range(3):
        y = codec.decode(codec.encode(x, step=step), len(x))
        for values in (y, theirs):
            assert (np.sign(values) == np.sign(x)).all()
            assert np.isin(np.abs(values) / low, [1, 2]).all()
        # The share of elements that go up is the mean fraction beyond the power of two.
        share = (np.abs(y) > low).mean()
        assert abs(share - (np.abs(x) / low - 1).mean()) < 4 * 0.5 / np.sqrt(len(x))


def test_mxnet_1bit_carries_what_it_does_not_send():
    rng = np.random.default_rng(0)
    codec = compll.compile("mxnet_1bit", "cpu", threshold=0.25)
    residual, state = np.zeros(300, np.float32), codec.init_state(300)
    for _ in range(5):
        g = rng.standard_normal(300).astype(np.float32)
        residual += g
        sent = np.where(residual > 0.25, 1, -1).astype(np.float32)
        residual -= sent
        np.testing.assert_array_equal(codec.decode(codec.encode(g, state=state), 300), sent)
        np.testing.assert_array_equal(state["residual"], residual)


@pytest.mark.parametrize("bits, bucket", first_fast([(8, 128), (4, 64), (2, 512)]))
def test_qsgd_moves_by_less_than_a_level_and_is_unbiased(bits, bucket):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(1000).astype(np.float32)
    codec = compll.compile("qsgd", "cpu", bits=bits, bucket=bucket)
    draws = np.array([codec.decode(codec.encode(x, step=s), 1000) for s in range(400)])
    norm = np.sqrt([np.square(x[i : i + bucket]).sum() for i in range(0, 1000, bucket)])
    level = np.repeat(norm / (2 ** (bits - 1) - 1), bucket)[:1000]
    assert (np.abs(draws - x) <= level * 1.001).all()
    assert np.abs((draws.mean(0) - x) / (level / np.sqrt(400))).max() < 4


def test_int8_dettmers_is_near_and_keeps_signs():
    x = np.concatenate([[1, -1], np.geomspace(1e-9, 1, 500), -np.geomspace(1e-6, 1, 500)])
    x = x.astype(np.float32)
    y = through("int8_dettmers", x)
    large = np.abs(x) >= 1e-1
    np.testing.assert_allclose(y[large], x[large], rtol=0.071)  # half a step of .9 / 64 at .1
    assert (np.sign(y[np.abs(x) > 1e-6]) == np.sign(x[np.abs(x) > 1e-6])).all()
    assert (y[np.abs(x) < 1e-7] == 0).all()
    assert len({v for v in np.abs(y).tolist() if v}) > 100  # most of the 127 values


@pytest.mark.parametrize("bucket", first_fast([0, 512]))
def test_ddp_uint8_moves_by_half_a_step(bucket):
    x = np.random.default_rng(2).standard_normal(2000).astype(np.float32)
    y = through("ddp_uint8", x, bucket=bucket)
    for i in range(0, 2000, bucket or 2000):
        part = x[i : i + (bucket or 2000)]
        step = (part.max() - part.min()) / 255
        assert np.abs(y[i : i + len(part)] - part).max() <= step * 0.501


def test_thresholds_keep_what_reaches_them():
    x = np.random.default_rng(3).standard_normal(3000).astype(np.float32)
    assert np.array_equal(through("threshold", x, tau=1.25), np.where(np.abs(x) >= 1.25, x, 0))
    half = np.abs(x).max() / 2
    assert np.array_equal(through("adaptive_threshold", x), np.where(np.abs(x) >= half, x, 0))


def test_qsparse_quantizes_the_largest():
    x = np.random.default_rng(4).standard_normal(5000).astype(np.float32)
    y = through("qsparse", x, ratio=0.02)
    kept = np.argsort(-np.abs(x))[:100]
    assert set(np.flatnonzero(y)) <= set(kept)
    level = np.sqrt(np.square(x[kept]).sum()) / 127
    assert np.abs(y[kept] - x[kept]).max() <= level * 1.001


@pytest.mark.parametrize("vector", vectors("stc_1pct"))
def test_stc(vector):
    x, wanted = INPUTS[f"input/{vector}"], MORE[f"stc_1pct/{vector}/decoded"]
    y = through("stc", x, ratio=0.01)
    np.testing.assert_allclose(np.sort(np.abs(y)), np.sort(np.abs(wanted)), rtol=1e-5)
    if vector not in ("withzeros_500", "zeros_100"):  # no ties there
        np.testing.assert_allclose(y, wanted, rtol=1e-5)


def test_stc_takes_about_ten_bits_for_an_element_it_keeps():
    x = np.random.default_rng(5).standard_normal(100_000).astype(np.float32)
    payload = compll.compile("stc", "cpu", ratio=0.01).encode(x)
    assert 9 < 8 * len(payload) / 1000 < 10


@pytest.mark.parametrize("natural", first_fast([False, True]))
def test_dithering_rounds_to_neighbouring_levels(natural):
    x = np.random.default_rng(6).standard_normal(4000).astype(np.float32)
    y = through("dithering", x, natural=natural)
    top = np.abs(x).max()
    grid = 2.0 ** np.arange(-15, 1) if natural else np.arange(16) / 15
    levels = np.unique(np.concatenate([[0], grid])) * top
    above = np.clip(np.searchsorted(levels, np.abs(x) * (1 - 1e-6)), 1, len(levels) - 1)
    near = np.minimum(np.abs(np.abs(y) - levels[above]), np.abs(np.abs(y) - levels[above - 1]))
    assert near.max() <= 1e-6 * top
    assert (np.sign(y) * np.sign(x) >= 0).all()
