"""Random specs: kernels give the payloads, values and states of the reference.

COMPLL_SPECS sets their number; 200 take four minutes of two cores.
"""

import os
import random

import numpy as np
import pytest

import compll
from compll.errors import SpecError
from tests.compll import random_specs
from tests.compll.cuda_host.pieces import bits, pieces_equal
from tests.tiers import first_fast

SEEDS = range(int(os.environ.get("COMPLL_SPECS", "200")))


def valid(seed, folder):
    """The text of a spec that the reference compiles, as most do."""
    source = random.Random(seed)
    while True:
        text = random_specs.spec(source)
        path = folder / "spec.yaml"
        path.write_text(text)
        try:
            compll.compile(path, "reference")
        except SpecError:
            continue
        return text, path


def gradient(rng, n):
    """Values with zeros of both signs, denormals and ties; or zeros of one sign."""
    if rng.random() < 0.2:
        return np.full(n, rng.choice([0.0, -0.0]), np.float32)
    x = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3)
    kind = rng.random(n)
    for value, most in ((0.0, 0.15), (-0.0, 0.2), (1e-41, 0.22), (np.round(x), 0.25)):
        x = np.where((kind < most) & (kind >= most - 0.05), value, x)
    return x.astype(np.float32)


def told(payload, decoded):
    """The payload's bytes; None for values that are not finite: a NaN may have either sign."""
    return payload.tobytes() if np.isfinite(decoded).all() else None


def encoded(codec, x, state, step):
    """The payload of a step. The second one's gradient is negated, the third's huge."""
    out, at = np.zeros(codec.payload_bytes(len(x)), np.uint8), np.zeros(1, np.int64)
    used = codec.encode_batch(
        x.copy(), np.array([[0, len(x), 0, 0, 0]]), out, at, state=state or None, seed=3, step=step,
        scale=(1.0, -1.0, 1e30, np.inf)[step],
    )  # fmt: skip
    return out[: used[0]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_on_the_cpu(seed, tmp_path, rng):
    text, path = valid(seed, tmp_path)
    codecs = [compll.compile(path, target) for target in ("cpu", "reference")]
    for n in (0, 1, 7, 33, 1025, 4099):
        states = [codec.init_state(n) for codec in codecs]
        for step in range(4):
            x, found = gradient(rng, n), []
            for codec, state in zip(codecs, states, strict=True):
                payload = encoded(codec, x, state, step)
                found.append((payload, codec.decode(payload, n)))
            (ours, y), (theirs, z) = found
            assert bits(y) == bits(z), (n, step, text)
            assert told(ours, y) == told(theirs, z), (n, step, text)
            for name in states[0]:
                assert bits(states[0][name]) == bits(states[1][name]), (n, step, name, text)


@pytest.mark.parametrize("seed", first_fast([1000 + seed for seed in SEEDS]))
def test_on_the_device(seed, tmp_path, rng):
    text, _ = valid(seed, tmp_path)
    pieces_equal(text, tmp_path, lambda n: gradient(rng, n), scale=rng.choice([1, -1]))
