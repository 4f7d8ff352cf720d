"""Matrices and rounds: PowerSGD against plain NumPy, orders of operations, refusals."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.errors import PayloadError, UsageError
from compll.numerics import matrices as matrix_numbers
from tests.compll.operators import computed
from tests.compll.world import World as Workers
from tests.compll.world import table
from tests.compll.wrong import refuses, tells
from tests.tiers import first_fast

World = functools.partial(Workers, "powersgd")


class Plain:
    """PowerSGD as in the paper, in float64, on matrices of the same shape.

    A matrix's padding belongs to no gradient: its values are not kept.
    """

    def __init__(self, workers, n, rank):
        self.n, self.cols = n, int(np.ceil(np.sqrt(n)))
        self.rows = -(-n // self.cols)
        self.errors = [np.zeros((self.rows, self.cols)) for _ in range(workers)]
        self.q = matrix_numbers.random_matrix(0, 0, self.cols, rank).astype(np.float64)

    def step(self, gradients):
        given = [np.pad(x, (0, self.rows * self.cols - self.n)) for x in gradients]
        given = [x.reshape(e.shape) + e for x, e in zip(given, self.errors, strict=True)]
        p = np.linalg.qr(np.mean([m @ self.q for m in given], axis=0))[0]
        self.q = np.mean([m.T @ p for m in given], axis=0)
        out = p @ self.q.T
        real = np.arange(out.size).reshape(out.shape) < self.n
        self.errors = [np.where(real, m - out, 0) for m in given]
        return out.reshape(-1)[: self.n]


@pytest.mark.parametrize("bits, off", [(32, 1e-4), (16, 2.4e-2)])
@pytest.mark.parametrize("workers, rank", first_fast([(3, 2), (1, 1), (2, 4)]))
def test_follows_the_paper(workers, rank, bits, off, rng):
    """Factors of 16 bits: equal to their precision, and their errors stay in the residual."""
    n = 1000
    together, plain = World(workers, n, rank=rank, bits=bits), Plain(workers, n, rank)
    assert together.codec.payload_bytes(n) == (32 + 32) * rank * bits // 8
    for step in range(5):
        gradients = [rng.standard_normal(n).astype(np.float32) for _ in range(workers)]
        ours, theirs = together.step(gradients, step), plain.step(gradients)
        assert np.linalg.norm(ours - theirs) < off * np.linalg.norm(theirs)
        for state, error in zip(together.states, plain.errors, strict=True):
            assert np.allclose(state["residual"], error.reshape(-1)[:n], atol=10 * off)


def test_factors_of_16_bits_hold_what_gradients_may_be():
    """A factor is larger than the gradient: as float16 it overflowed to NaN."""
    n, size = 1000, np.float32(4e4)
    world = World(3, n, bits=16)
    found = world.step([np.full(n, size)] * 3)
    assert np.allclose(found, size, rtol=1e-2)


@pytest.mark.parametrize("rank", first_fast([9, 1, 8]))
@pytest.mark.parametrize("columns, n", [(5, 999), (70, 9999), (0, 300_001)])
def test_backends_agree_on_products_of_every_length(rank, columns, n, rng):
    """Inner dimensions at most and above 8, known and unknown; several turns of rows."""
    params = {"rank": rank, "columns": columns}
    ours, theirs = (World(2, n, target, **params) for target in ("cpu", "reference"))
    for step in range(2):
        gradients = [rng.standard_normal(n).astype(np.float32) for _ in range(2)]
        a, b = ours.step(gradients, step), theirs.step(gradients, step)
        assert np.array_equal(a.view(np.uint32), b.view(np.uint32))
        for one, other in zip(ours.states, theirs.states, strict=True):
            assert all(np.array_equal(one[k], other[k]) for k in one)


def test_a_direction_that_was_lost_comes_back(rng):
    """After a gradient of zeros, and one of rank one, the second column finds a direction again."""
    world = World(2, 1600, rank=2)
    one = np.outer(rng.standard_normal(40), rng.standard_normal(40)).reshape(-1)
    for step, x in enumerate((np.zeros(1600), one)):
        world.step([x.astype(np.float32)] * 2, step)
        for state in world.states:
            state["residual"][:] = 0
    two = (one + np.outer(rng.standard_normal(40), rng.standard_normal(40)).reshape(-1)) / 2
    for step in range(2, 6):
        y = world.step([two.astype(np.float32)] * 2, step)
        for state in world.states:
            state["residual"][:] = 0
    assert np.linalg.norm(y - two) < 1e-3 * np.linalg.norm(two)


PRODUCTS = """
  width: {width}
  height: ceil(n / width)
  m: matrix(g, width)
  right: random_matrix(width, columns)
  left: random_matrix(height, columns)
  y: m @ right
  z: transpose(m) @ left
"""


#: expressions of a matrix's width, and numbers of columns of what it is multiplied by
SHAPES = itertools.product(
    enumerate(("ceil(sqrt(n))", "max(1, floor(n / 3))", "min(n, 4)", "4")),
    enumerate((1, 2, 5, 16, 19)),
)


@pytest.mark.parametrize(
    "width, columns",
    [
        pytest.param(width, columns, marks=() if i == j else pytest.mark.slow)
        for (i, width), (j, columns) in SHAPES
    ],
)
@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 4000), power=st.integers(-20, 20))
def test_products_have_one_order(n, width, columns, power):
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32) * np.float32(10.0) ** power
    cols = {"c": int(np.ceil(np.sqrt(n))), "ma": max(1, n // 3), "mi": min(n, 4), "4": 4}
    cols = next(v for k, v in cols.items() if width.startswith(k))
    rows = -(-n // cols)
    payload = "{y: 'float32[height, columns]', z: 'float32[width, columns]'}"
    encode = PRODUCTS.format(width=width)
    found = computed(x, encode, payload, step=n, columns=columns)
    m = np.zeros(rows * cols, np.float64)
    m[:n] = x
    m = m.reshape(rows, cols)
    right, left = (matrix_numbers.random_matrix(n, 0, k, columns) for k in (cols, rows))
    wanted = np.concatenate([(m @ right).reshape(-1), (m.T @ left).reshape(-1)])
    assert np.allclose(found, wanted, rtol=1e-6, atol=4e-5 * np.abs(x).max())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.sampled_from([1, 3, 6]), st.integers(0, 1000), st.integers(0, 5))
def test_bases_have_one_order(rows, cols, seed, equal):
    a = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    a[:, : min(equal, cols)] = a[:, :1]
    encode = (
        "  h: ceil(n / columns)\n  y: orthonormal(matrix(g, columns), random_matrix(h, columns))"
    )
    found = computed(
        a.reshape(-1), encode, "{y: 'float32[h, columns]'}", step=seed, columns=cols
    ).reshape(rows, cols)
    gram = found.astype(np.float64).T @ found
    expected = np.diag(np.arange(cols) < rows).astype(float)  # more columns than rows: zeros
    assert np.allclose(np.sort(np.diag(gram)), np.sort(np.diag(expected)), atol=1e-5)
    assert np.allclose(gram, np.diag(np.diag(gram)), atol=1e-5)


def test_when_it_pays():
    codec = compll.compile("powersgd", rank=2)
    assert not codec.suits(16)
    assert codec.suits(17 * 17)
    assert not compll.compile("powersgd", rank=2, min_rate=10.0).suits(17 * 17)
    assert compll.compile("onebit").suits(1)


def test_wrong_calls_are_told():
    codec, x, at = compll.compile("powersgd"), np.zeros(100, np.float32), np.zeros(1, np.int64)
    room = np.zeros(codec.rounds[0].payload_bytes(100), np.uint8)
    with pytest.raises(UsageError, match="round 1 of 2 with 0 before it"):
        codec.encode_round(1, x, table(100), room, at, workers=2)
    with pytest.raises(PayloadError, match="round 'p' ends early"):
        codec.encode_round(0, x, table(100), room[1:], at, workers=2)
    with pytest.raises(UsageError, match="round 0 of 0"):
        compll.compile("onebit").encode_round(0, x, table(100), room, at, workers=2)
    with pytest.raises(UsageError, match="a matrix of 65536 x 64 elements for a tensor of 1"):
        compll.compile("powersgd", columns=65536, rank=64).payload_bytes(1)


GOOD = """name: example
params:
  rank: 2
state:
  warm: float32[width, rank]
encode:
  width: ceil(sqrt(n))
  m: matrix(g, width)
  p: m @ orthonormal(warm, random_matrix(width, rank))
  q: transpose(m) @ orthonormal(combined(p))
payload:
  p: float32[ceil(n / width), rank]
  q: float32[width, rank]
rounds: {p: mean, q: mean}
decode: flat(orthonormal(p) @ transpose(q))
update: {warm: combined(q)}
feedback: error
when: n > 100
"""


@pytest.mark.parametrize(
    "old, new, line, message",
    [
        ("{p: mean, q: mean}", "{q: mean, p: mean}", 14, "'q' needs combined(p)"),
        ("{p: mean, q: mean}", "{p: mean}", 16, "combined takes the name of a payload field"),
        ("{p: mean, q: mean}", "{p: mean, q: mean, r: mean}", 14, "is no payload field"),
        ("{p: mean, q: mean}", "{p: mean, q: median}", 14, "ranks combine by mean"),
        ("combined(p)", "combined(m)", 10, "combined takes the name of a payload field"),
        ("flat(orthonormal(p)", "flat(orthonormal(combined(p))", 15, "decode sees what the ranks"),
        ("transpose(m) @", "m @ m @", 10, "the columns of the first are not the rows"),
        ("flat(orthonormal(p) @ transpose(q))", "orthonormal(p)", 15, "not one number per element"),
        ("p: float32[ceil(n / width), rank]", "p: float32[width, rank]", 12, "'p' is declared"),
        ("p: float32[ceil(n / width), rank]", "p: float32", 12, "'p' is declared no matrix"),
        ("p: float32[ceil(n / width), rank]", "p: uint8[ceil(n / width), rank]", 12, "a matrix is"),
        ("q: float32[width, rank]", "q: float32[width, ]", 13, "an expression is missing"),
        ("width: ceil(sqrt(n))", "width: sqrt(n)", 5, "whole numbers"),
        ("width: ceil(sqrt(n))", "width: ceil(mean(g))", 5, "whole numbers"),
        ("m: matrix(g, width)", "m: matrix(mean(g), width)", 8, "matrix takes elements"),
        ("m: matrix(g, width)", "m: matrix(g, width) + g", 8, "does not go together with a matrix"),
        ("when: n > 100", "when: mean(g) > 1", 18, "`when:` is a condition of n"),
        ("when: n > 100", "when: step > 1", 18, "`when:` is a condition of n"),
        ("feedback: error", "group: 64", 8, "a grouped spec has no matrices"),
        ("feedback: error", "merge: vote", 17, "`rounds:` says how payloads combine"),
        ("{warm: combined(q)}", "{warm: combined(p)}", 16, "cannot hold"),
        ("m: matrix(g, width)", "m: matrix(sign(g), width)", 14, "gradient is not finite"),
    ],
)
def test_mistakes_are_told(old, new, line, message, tmp_path):
    tells(GOOD, old, new, line, message, tmp_path)


def test_every_field_has_a_round(tmp_path):
    text = GOOD.replace("{p: mean, q: mean}", "{p: mean}").replace("combined(q)", "q")
    refuses(text, "14:1: payload field 'q' has no round", tmp_path)


def test_matrices_without_rounds(tmp_path, rng):
    """A payload that travels whole: the error feedback of a low rank approximation."""
    path = tmp_path / "spec.yaml"
    path.write_text(GOOD.replace("rounds: {p: mean, q: mean}\n", "").replace("combined(p)", "p")
                    .replace("combined(q)", "q"))  # fmt: skip
    codecs = [compll.compile(path, target) for target in ("cpu", "reference")]
    x = rng.standard_normal(777).astype(np.float32)
    payloads = [c.encode(x, state=c.init_state(777)) for c in codecs]
    assert np.array_equal(*payloads)
    assert np.array_equal(payloads[0], World(1, 777).codec.encode(x))
    assert codecs[0].rounds == ()


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_decode_knows_a_random_matrix_by_its_name(target, tmp_path, rng):
    """Decode repeats the matrix, like `shared` draws: a sketch's payload needs no basis."""
    text = (
        "name: sketched\nencode:\n  r: random_matrix(64, 4)\n  p: matrix(g, 64) @ r\n"
        "payload:\n  p: float32[ceil(n / 64), 4]\ndecode: flat(p @ transpose(r))\n"
    )
    x = rng.standard_normal(6400).astype(np.float32)
    found = []
    for number, decode in enumerate(("r", "random_matrix(64, 4)")):
        path = tmp_path / f"sketched{number}.yaml"
        path.write_text(text.replace("transpose(r)", f"transpose({decode})"))
        codec = compll.compile(path, target)
        assert codec.needs_step
        found.append(codec.decode(codec.encode(x, step=3), x.size, step=3))
    assert np.array_equal(*found)
    assert 0.9 < found[0] @ x / (x @ x) < 1.8  # four thirds, in the mean


WARM = """name: warm
state: {warm: "float32[2, 3]"}
encode:
  m: matrix(g, 3)
  p: m @ transpose(ones(2, 3) + warm)
payload: {p: "float32[ceil(n / 3), 2]"}
decode: flat(p @ ones(2, 3))
update: {warm: warm + 1}
"""


def test_a_call_without_states_has_zeros_of_a_matrix(tmp_path, rng):
    path = tmp_path / "warm.yaml"
    path.write_text(WARM)
    x = rng.standard_normal(3000).astype(np.float32)
    one, two = (compll.compile(path, target).encode(x) for target in ("cpu", "reference"))
    np.testing.assert_array_equal(one, two)
