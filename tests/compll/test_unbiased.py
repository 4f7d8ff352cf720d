"""Specs that claim `unbiased: true`: the mean of decoded values is the gradient."""

import numpy as np
import pytest

import compll
from tests.tiers import first_fast

N, DRAWS = 1024, 400
#: elements that are rarely kept would need far more draws
PARAMS = {
    "wangni": {"ratio": 0.5},
    "randomk": {"ratio": 0.5, "residual": False},
    "thc": {"clipped": 0.0, "residual": False, "block": 64},
}


def claims(name):
    """True if the spec, with these parameters, claims to be unbiased."""
    return compll.compile(name, "reference", **PARAMS.get(name, {})).module.unbiased


CLAIMS = [name for name in compll.list_specs() if claims(name)]


def sample(x, name):
    """DRAWS decoded values of each element of x, float64 [DRAWS, N]."""
    codec = compll.compile(name, "cpu", **PARAMS.get(name, {}))
    payloads = [codec.encode(x, seed=5, step=step) for step in range(DRAWS)]
    return np.array([codec.decode(p, N, step=i) for i, p in enumerate(payloads)], np.float64)


def gradients():
    rng = np.random.default_rng(3)
    base = rng.laplace(size=N)
    return {
        "laplace": base * 0.01,
        "one sign": np.abs(base),
        "large": base * 1e20,
        "small": base * 1e-25,
        "few": np.where(rng.random(N) < 0.05, base, 0),
        # the inverse of this scale is infinite
        "tiny": np.where(rng.random(N) < 0.3, 0, base * 2e-39),
    }


@pytest.mark.parametrize("kind", first_fast(gradients()))
@pytest.mark.parametrize("name", CLAIMS)
def test_mean_of_decoded_is_the_gradient(name, kind):
    x = gradients()[kind].astype(np.float32)
    y = sample(x, name)
    error, spread = y.mean(0) - x, y.std(0, ddof=1) / np.sqrt(DRAWS)
    # An element near a level is rarely rounded away from it: its own spread may be 0 by chance.
    floor = 0.3 * np.sqrt((spread**2).mean()) + 1e-6 * np.abs(x).max()
    z = error / np.maximum(spread, floor)
    assert abs(z.sum()) < 5 * np.sqrt(len(z))
    assert (z**2).mean() < 1.35
    assert np.abs(z).max() < 6


def test_a_biased_method_would_be_found(monkeypatch):
    """Rounding to nearest fails, and so does a shift of all elements by a third of a level."""
    claim = test_mean_of_decoded_is_the_gradient
    with pytest.raises(AssertionError):
        claim("ddp_uint8", "laplace")
    draw = sample
    monkeypatch.setitem(globals(), "sample", lambda x, name: draw(x, name) + np.abs(x).max() / 21)
    with pytest.raises(AssertionError):
        claim("int4_group", "laplace")


def test_claims_are_made():
    assert {"int4_group", "int8_group", "qsgd", "randomk", "terngrad_uniform"} <= set(CLAIMS)
    assert not compll.compile("randomk", "reference").module.unbiased
