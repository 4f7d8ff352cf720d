"""Singular vectors, probabilities, numbers of matrices: atomo; refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.numerics import matrices
from tests.compll.wrong import tells
from tests.tiers import first_fast


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=30), st.integers(0, 2**23 - 1))
def test_no_more_are_chosen_than_the_chances_sum_to(chances, draw):
    # A draw has 23 bits; with chances of 20 all sums are exact.
    p, u = np.array(chances, np.float32) / 2**20, draw / 2**23
    most = int(np.ceil(p.sum(dtype=np.float64)))
    at = matrices.chosen(p, u, most + 2)
    found = at[at >= 0]
    assert (np.diff(found) > 0).all()
    assert most - 1 <= len(found) <= most + 1e-9
    assert (p[found] > 0).all()
    assert (at[len(found) :] == -1).all()
    assert set(np.flatnonzero(p == 1)) <= set(found)


def test_each_is_chosen_with_its_chance(rng):
    p = rng.random(20).astype(np.float32)
    p *= np.float32(3) / p.sum()
    us = (np.arange(20000) + 0.5) / 20000
    times = np.zeros(20)
    for u in us:
        at = matrices.chosen(p, u, 3)
        times[at[at >= 0]] += 1
    assert np.allclose(times / 20000, p, atol=2e-4)
    assert (matrices.chosen(np.full(4, np.nan, np.float32), 0.5, 3) == -1).all()


@pytest.mark.parametrize(
    "n, rank, columns", first_fast([(400, 4, 0), (1000, 3, 16), (400, 8, 0), (5, 2, 0)])
)
def test_sends_products_with_a_part_of_a_basis(n, rank, columns, rng):
    """Each sent pair is m v and v / p, for columns v of a basis, as many as were drawn."""
    codec = compll.compile("atomo", rank=rank, columns=columns)
    root = int(np.ceil(np.sqrt(n)))
    width = root if columns == 0 else min(columns, root)
    height = -(-n // width)
    x = rng.standard_normal(n).astype(np.float32)
    m = np.pad(x, (0, height * width - n)).reshape(height, width)
    for step in range(6):
        parts = codec.encode(x, step=step).view(np.float32)
        left, right = np.split(parts, [height * rank])
        left, right = left.reshape(height, rank), right.reshape(width, rank)
        sizes = np.linalg.norm(right, axis=0)
        drawn = sizes > 0
        unit = np.abs(x).max()
        v = right[:, drawn] / sizes[drawn]
        assert drawn.sum() >= min(rank, width, height) - 1
        assert np.allclose(v.T @ v, np.eye(drawn.sum()), atol=1e-5)
        assert np.allclose(left[:, drawn] * unit, m @ v, atol=1e-4)


@pytest.mark.parametrize("rank, columns", first_fast([(4, 0), (2, 16), (2, 4)]))
def test_the_mean_over_ranks_is_unbiased_and_tighter(rank, columns, rng):
    """Ranks draw independently, so four have half the spread of one."""
    n, codec = 256, compll.compile("atomo", rank=rank, columns=columns)
    x = rng.laplace(size=n).astype(np.float32)

    def mean_of(ranks, step):
        payloads = [codec.encode(x, seed=rank, step=step) for rank in range(ranks)]
        return np.mean([codec.decode(p, n) for p in payloads], 0)

    for ranks in (1, 4):
        found = np.array([mean_of(ranks, step) for step in range(600)])
        error = np.linalg.norm(found.mean(0) - x)
        spread = np.sqrt((found.var(0) / 600).sum())
        assert error < 1.5 * spread
        if ranks == 1:
            alone = spread
    assert spread == pytest.approx(alone / 2, rel=0.1)


def test_energy_beyond_what_is_sent_is_as_the_paper_says(rng):
    """The variance is the sum of size**2 * (1 / p - 1) over the triples."""
    n, codec = 400, compll.compile("atomo", rank=4, columns=0)
    x = rng.standard_normal(n).astype(np.float32)
    size = np.linalg.svd(x.reshape(20, 20))[1]
    p = np.minimum(1, 4 * size / size.sum())
    found = [codec.decode(codec.encode(x, step=step), n) - x for step in range(800)]
    assert np.mean([e @ e for e in found]) == pytest.approx((size**2 * (1 / p - 1)).sum(), rel=0.1)


def test_when_it_pays():
    codec = compll.compile("atomo")
    assert not codec.suits(16)
    assert codec.suits(4096)
    assert not codec.needs_step
    assert codec.rounds == ()


GOOD = """name: example
params:
  rank: 2
encode:
  m: matrix(g, 8)
  v: orthonormal(random_matrix(8, 8))
  size: sqrt(ones(1, ceil(n / 8)) @ ((m @ v) * (m @ v)))
  p: min(1, size * (rank / sum(size)))
  at: chosen(p, rank)
  left: take_columns(m @ v, at)
  weight: take_columns(1 / p, at)
  right: take_columns(v, at)
payload:
  left: float32[ceil(n / 8), rank]
  weight: float32[1, rank]
  right: float32[8, rank]
decode: flat((left * weight) @ transpose(right))
"""


def test_weights_may_travel_by_themselves(tmp_path, rng):
    """Rows of matrices times a row, in encode and in decode."""
    path = tmp_path / "spec.yaml"
    path.write_text(GOOD)
    x, found = rng.standard_normal(100).astype(np.float32), []
    codec, reference = (compll.compile(path, target) for target in ("cpu", "reference"))
    for step in range(400):
        payload = codec.encode(x, step=step)
        if step < 3:
            assert np.array_equal(payload, reference.encode(x, step=step))
        found.append(codec.decode(payload, 100))
    spread = np.sqrt((np.var(found, axis=0) / 400).sum())
    assert np.linalg.norm(np.mean(found, axis=0) - x) < 1.5 * spread


@pytest.mark.parametrize(
    "text, value",
    [
        ("sum(m)", lambda m: m.sum()),
        ("mean(m)", lambda m: m.mean()),
        ("max(m) - min(m)", lambda m: m.max() - m.min()),
        ("norm2(m)", np.linalg.norm),
        ("std(m)", np.std),
        ("sum(where(m > 0, m * m, -m) / 2)", lambda m: np.where(m > 0, m * m, -m).sum() / 2),
        ("sum(m * random_matrix(1, 10)) * 0", lambda m: 0),
        ("sum(m + 2 * mean(g))", lambda m: (m + 2 * m.mean()).sum()),
    ],
)
def test_numbers_of_matrices(text, value, tmp_path, rng):
    path = tmp_path / "spec.yaml"
    head = "name: example\nencode:\n  m: matrix(g, 10)\n"
    path.write_text(f"{head}  y: {text}\npayload: {{y: float32}}\ndecode: y\n")
    x = rng.standard_normal(90).astype(np.float32)
    results = [compll.compile(path, target).encode(x) for target in ("cpu", "reference")]
    assert np.array_equal(*results)
    found = results[0][:4].view(np.float32)[0]
    assert np.isclose(found, value(x.astype(np.float64).reshape(9, 10)), atol=1e-4)


@pytest.mark.parametrize(
    "old, new, line, message",
    [
        ("chosen(p, rank)", "chosen(p, mean(g))", 9, "rows and columns are whole numbers"),
        ("chosen(p, rank)", "chosen(m, rank)", 9, "chosen takes a row of chances"),
        ("chosen(p, rank)", "chosen(p > 0, rank)", 9, "chosen takes chances, not bool"),
        ("chosen(p, rank)", "chosen(g, rank)", 9, "chosen takes matrices, not float[n]"),
        ("(m @ v, at", "(m @ v, p", 10, "takes columns by their positions"),
        ("(m @ v, at", "(transpose(m), at", 10, "takes positions from chosen()"),
        ("(m @ v, at", "(g, at", 10, "take_columns takes matrices"),
        ("1 / p", "p / g", 11, "float[n] does not go together with a matrix"),
        ("1 / p", "m / transpose(p)", 11, "do not go together"),
        ("left * weight", "left * transpose(weight)", 17, "do not go together"),
        ("(left * weight)", "take_columns(left, chosen(left, 2))", 17, "chosen in encode"),
        ("sum(size)", "sum(size, size > 0)", 8, "a condition chooses elements"),
        ("weight: float32[1, rank]", "weight: float32[rank]", 15, "'weight' is declared no matrix"),
    ],
)
def test_mistakes_are_told(old, new, line, message, tmp_path):
    tells(GOOD, old, new, line, message, tmp_path)
