"""Thresholds of a sample that turn out wrong: payloads and states equal the reference's."""

import numpy as np
import pytest

import compll
from compll.numerics.draws import sample_positions
from compll.runtime.library import locate
from tests.tiers import first_fast

N = 20_000
COUNT = N // 100  # of dgc's sample


def gradient(kind, step):
    """Normal numbers, with `kind` applied to the elements that this step samples."""
    rng = np.random.default_rng(step)
    x = rng.standard_normal(N, dtype=np.float32)
    at = sample_positions(0, step, 0, N, COUNT)
    if kind == "too few above the guess":
        x[at] *= 50
    elif kind == "more than there is room for":
        x[at] *= 1e-3
    elif kind == "more than wanted":
        x[at] *= 0.9
    elif kind == "zeros":
        x[:] = 0
    elif kind == "not finite":
        x[at[:5]] = np.nan
        x[::997] = np.inf
    return x


KINDS = ("right", "too few above the guess", "more than there is room for", "more than wanted",
         "zeros", "not finite")  # fmt: skip


@pytest.mark.parametrize("bits", first_fast([32, 16]))
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("held", [0, 1e-20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_guess_changes_nothing(kind, warmup, held, bits):
    steps_equal("dgc", kind, held, (0, 1, 5), ratio=0.01, warmup=warmup, bits=bits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[::2])
def test_states_of_16_bits_are_taken_back_too(kind, tmp_path):
    path = tmp_path / "halves.yaml"
    path.write_text(locate("dgc").read_text().replace("float32[n]", '"bfloat16[n]"'))
    steps_equal(path, kind, 0, range(3), ratio=0.01)


def steps_equal(spec, kind, held, steps, **params):
    """Compare payloads and states of the CPU with the reference's; these begin with `held`."""
    cpu, reference = (compll.compile(spec, target, **params) for target in ("cpu", "reference"))
    states = [c.init_state(N) for c in (cpu, reference)]
    for state in states:
        state["u"][:], state["v"][:] = held, -held
    for step in steps:
        x = gradient(kind, step)
        mine, meant = (
            c.encode(x, state=s, step=step) for c, s in zip((cpu, reference), states, strict=True)
        )
        assert np.array_equal(mine, meant)
        assert all(np.array_equal(states[0][name], states[1][name]) for name in "uv")
