"""Transforms, draws that ranks share, codes that add: thc against plain NumPy, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.errors import UsageError
from compll.numerics import matrices as matrix_numbers
from compll.numerics.draws import shared_uniform
from tests.compll.operators import computed
from tests.compll.world import World, table
from tests.compll.wrong import tells

BLOCKS = st.sampled_from([2, 4, 8, 64, 1024])


def plain(x, block):
    """The transform as products of matrices, in float64."""
    out, at, size = np.array(x, np.float64), 0, block
    while at < len(x):
        while len(x) - at < size:
            size //= 2
        matrix = np.ones((1, 1))
        while len(matrix) < size:
            matrix = np.kron([[1, 1], [1, -1]], matrix)
        out[at : at + size] = matrix @ out[at : at + size] / np.sqrt(size)
        at += size
    return out


def hadamard(x, block):
    """The transform, as all backends compute it."""
    return computed(x, "  y: hadamard(g, block)", "{y: 'float32[n]'}", block=block)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3000), BLOCKS, st.integers(0, 1000))
def test_hadamard_is_the_matrix_and_its_own_inverse(n, block, seed):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    found = hadamard(x, block)
    assert np.allclose(found, plain(x, block), atol=1e-5)
    assert np.allclose(hadamard(found.copy(), block), x, atol=1e-5)


@pytest.mark.parametrize("n, block", [(5 << 16, 1 << 18), ((1 << 20) + 3, 1 << 20)])
def test_hadamard_of_large_blocks(n, block, rng):
    x = rng.standard_normal(n).astype(np.float32)
    assert np.isclose(np.linalg.norm(hadamard(x, block)), np.linalg.norm(x), rtol=1e-4)


def test_non_finite_values_stay_non_finite(rng):
    for bad in (np.nan, np.inf, -np.inf):
        x = rng.standard_normal(100).astype(np.float32)
        x[70] = bad
        y = matrix_numbers.hadamard(x, 64)
        assert np.isfinite(y[:64]).all()
        assert not np.isfinite(y[64:96]).any()


def test_shared_draws_are_uniform_and_not_those_of_random():
    draws = [shared_uniform(3, 1, k, 0, 1 << 16, 1024) for k in range(3)]
    for u in draws:
        assert u.min() >= 0
        assert u.max() < 1
        counts = np.histogram(u, bins=64, range=(0, 1))[0]
        assert ((counts - 1024.0) ** 2 / 1024).sum() < 63 + 5 * np.sqrt(126)
    assert np.abs(np.corrcoef(draws) - np.eye(3)).max() < 0.02
    parts = [shared_uniform(3, 1, 0, a, 1 << 15, 1024) for a in (0, 1 << 15)]
    assert np.array_equal(np.concatenate(parts), draws[0])


class Plain:
    """THC as in the paper, in float64, with the language's random rounding."""

    def __init__(self, workers, n, bits, clipped, block):
        self.n, self.s, self.block, self.clipped = n, 2**bits - 1, block, clipped
        self.errors = np.zeros((workers, n))

    def step(self, gradients, step):
        sign = np.where(shared_uniform(step, 0, 0, 0, self.n, 1024) < 0.5, -1, 1)
        given = gradients + self.errors
        y = np.array([plain(sign * x, self.block) for x in given])
        tops = np.abs(y).max(1)
        if self.clipped:
            normal = compll.numerics.bits.probit(1 - self.clipped / 2)
            tops = np.abs(y).mean(1) * np.sqrt(np.pi / 2) * normal
        top = tops.max()
        u = np.array([
            compll.numerics.draws.uniform(rank, step, 0, 0, 0, self.n) for rank in range(len(y))
        ])  # fmt: skip
        q = np.clip(np.floor((y + top) * self.s / (2 * top) + u), 0, self.s)
        sent = np.array([sign * plain(one * 2 * top / self.s - top, self.block) for one in q])
        self.errors = given - sent
        return sent.mean(0), 2 * top / self.s


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize(
    "workers, bits, clipped, block", [(1, 4, 0.0, 64), (2, 4, 0.03125, 1024), (3, 2, 0.1, 4096)]
)
def test_follows_the_paper(workers, bits, clipped, block, target, rng):
    n = 1500
    world = World("thc", workers, n, target, bits=bits, clipped=clipped, block=block)
    method = Plain(workers, n, bits, clipped, block)
    for step in range(3):
        gradients = rng.standard_normal((workers, n)).astype(np.float32)
        ours = world.step(list(gradients), step)
        theirs, gap = method.step(gradients, step)
        # Where float32 and float64 round to other sides of a step, a whole run differs a little.
        assert np.linalg.norm(ours - theirs) < 0.1 * gap * np.sqrt(n) / workers
        for state, error in zip(world.states, method.errors, strict=True):
            assert np.linalg.norm(state["residual"] - error) < 0.1 * gap * np.sqrt(n)
            error[:] = state["residual"]


def test_a_maximum_that_is_not_finite_is_stored_as_infinity():
    codec, at = compll.compile("thc"), np.zeros(1, np.int64)
    x, out = np.full(100, np.nan, np.float32), np.zeros(4, np.uint8)
    codec.encode_round(0, x, table(100), out, at, workers=2)
    assert np.isposinf(out.view(np.float32)[0])


@pytest.mark.parametrize("bits, most", [(1, 255), (2, 85), (4, 17)])
def test_codes_of_too_many_ranks_do_not_fit_a_byte(bits, most):
    codec = compll.compile("thc", bits=bits)
    assert codec.needs_step
    assert codec.refuses_workers(most) is None
    reason = codec.refuses_workers(most + 1)
    assert f"{most + 1} ranks add up codes of 0 to {2**bits - 1}" in reason
    assert f"at most {most} ranks, or fewer bits" in reason
    x, out = np.zeros(10, np.float32), np.zeros(4, np.uint8)
    with pytest.raises(UsageError, match="a byte holds 255"):
        codec.encode_round(0, x, table(10), out, np.zeros(1, np.int64), workers=most + 1)
    assert compll.compile("powersgd").refuses_workers(10**6) is None


def test_the_largest_sum_fits(rng):
    """Seventeen ranks whose codes are all 15 decode correctly."""
    world = World("thc", 17, 64, clipped=0.0, residual=False, block=64)
    sign = np.where(shared_uniform(0, 0, 0, 0, 64, 1024) < 0.5, -1, 1)
    x = (sign * matrix_numbers.hadamard(np.full(64, 3, np.float32), 64)).astype(np.float32)
    assert np.allclose(world.step([x] * 17), x, atol=1e-4)


GOOD = """name: example
params:
  block: 64
encode:
  sign: where(shared(0, 1) < 0.5, -1, 1)
  y: hadamard(sign * g, block)
  top: max(abs(y))
  q: (y + combined(top)) / combined(top) * 7.5 + random(0, 1)
payload:
  top: float32
  q: uint4[n]
rounds: {top: max, q: mean}
decode: sign * hadamard((q / 7.5 - 1) * top, block)
feedback: own
"""


@pytest.mark.parametrize(
    "old, new, line, message",
    [
        ("block: 64", "block: 63", 6, "a block is a power of two from 2 to 1048576"),
        ("sign * g, block", "sign * g, n", 6, "it must follow from the parameters alone"),
        ("sign * g, block", "max(g), block", 6, "hadamard takes elements, not float"),
        ("(q / 7.5 - 1) * top, block", "shared(0, 1) * top, block", 13, "made in encode"),
        ("q: mean", "q: max", 12, "or the mean of codes, uint1 to uint8"),
        ("q: mean", "q: sum", 12, "ranks combine by mean, max"),
        ("max(abs(y))", "max(y)", 12, "would not see that a gradient is not finite"),
        ("uint4[n]", "trit[n]", 12, "a round takes float32, float16, bfloat16"),
        ("feedback: own", "group: 64", 6, "without `group:`, hadamard(x, 64) mixes runs"),
        ("sign * hadamard", "y * hadamard", 13, "decode uses 'y', which the payload lacks"),
    ],
)
def test_mistakes_are_told(old, new, line, message, tmp_path):
    tells(GOOD, old, new, line, message, tmp_path)
