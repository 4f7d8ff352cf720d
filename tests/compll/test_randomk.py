"""Selections that all ranks draw alike: positions, randomk against plain NumPy, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.numerics.draws import shared_positions
from tests.compll.world import World
from tests.compll.wrong import refuses, tells

PLACES = st.tuples(
    *(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 2**40), st.integers(1, 3000))
)


@settings(max_examples=200, deadline=None)
@given(PLACES, st.floats(0, 1))
def test_positions_are_ascending_and_inside(place, share):
    *where, n = place
    count = int(share * n)
    at = shared_positions(*where, n, count)
    assert at.dtype == np.int64
    assert len(at) == count
    assert (np.diff(at) > 0).all()
    assert count == 0 or (at[0] >= 0 and at[-1] < n)
    assert np.array_equal(at, shared_positions(*where, n, count))


@pytest.mark.parametrize("n, count", [(2**32, 1000), (2**32 - 1, 7), (2**31 + 3, 2)])
def test_positions_in_large_tensors(n, count):
    at = np.array([shared_positions(step, 1, 0, n, count) for step in range(200)])
    assert (np.diff(at, axis=1) > 0).all()
    assert at.min() >= 0
    assert at.max() < n
    assert abs(at.mean() / n - 0.5) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("n, count", [(50, 7), (64, 16), (37, 1), (11, 10)])
def test_every_position_has_the_same_chance(n, count):
    """Also if stretches differ by one; draws vary over steps, tensors and parts of a tensor."""
    draws = 20000
    for place in range(3):
        where = [[0, 0, 0] for _ in range(draws)]
        for i, one in enumerate(where):
            one[place] = i
        times = np.zeros(n)
        for one in where:
            times[shared_positions(*one, n, count)] += 1
        share = count / n
        spread = np.sqrt(draws * share * (1 - share))
        assert np.abs(times - draws * share).max() < 4.5 * spread, place


def test_stretches_are_drawn_independently():
    at = np.array([shared_positions(step, 0, 0, 4096, 4) for step in range(4000)])
    gaps = np.diff(at, axis=1)
    assert abs(np.corrcoef(gaps[:, 0], gaps[:, 2])[0, 1]) < 5 / np.sqrt(4000)
    assert gaps.min() < 100
    assert gaps.max() > 1900


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("workers, ratio", [(1, 0.5), (2, 0.1), (3, 0.01)])
def test_with_feedback_against_numpy(workers, ratio, target, rng):
    n = 1000
    world = World("randomk", workers, n, target, ratio=ratio)
    kept_back = np.zeros((workers, n), np.float32)
    for step in range(5):
        given = rng.standard_normal((workers, n)).astype(np.float32)
        at = shared_positions(step, 0, 0, n, max(1, int(n * ratio)))
        kept_back += given
        expected = np.zeros(n, np.float32)
        expected[at] = kept_back[:, at].sum(0) / np.float32(workers)
        kept_back[:, at] = 0
        assert np.allclose(world.step(list(given), step), expected, rtol=1e-6, atol=1e-6)
        for state, left in zip(world.states, kept_back, strict=True):
            assert np.array_equal(state["residual"], left)


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_without_feedback_values_are_scaled_up(n, rng):
    world = World("randomk", 2, n, ratio=0.25, residual=False)
    given = rng.standard_normal((2, n)).astype(np.float32)
    y, k = world.step(list(given), 9), max(1, n // 4)
    at = shared_positions(9, 0, 0, n, k)
    assert np.array_equal(np.flatnonzero(y), at)
    assert np.allclose(y[at], given.mean(0)[at] * n / k)
    assert world.states == [{}, {}]


def test_parts_of_a_tensor_draw_their_own_positions():
    codec = compll.compile("randomk", ratio=0.1, residual=False)
    x = np.ones(2000, np.float32)
    rows = np.array([[0, 1000, 3, 0, 0], [1000, 1000, 3, 1000, 1000]])
    at, out = np.array([0, 400]), np.zeros(800, np.uint8)
    used = codec.encode_batch(x, rows, out, at, step=5)
    y = np.zeros(2000, np.float32)
    codec.decode_batch(out, rows, at, used, y, step=5)
    assert np.allclose(y[y != 0], 10)
    assert np.array_equal(np.flatnonzero(y[:1000]), shared_positions(5, 3, 0, 1000, 100))
    assert np.array_equal(np.flatnonzero(y[1000:]), shared_positions(5, 3, 1000, 1000, 100))
    codec.decode_batch(out, rows, at, used, y, add=True, step=5)
    assert np.allclose(y[y != 0], 20)


@pytest.mark.parametrize("name", ["randomk", "thc"])
@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_steps_are_whole_numbers(name, target, rng):
    """NumPy's integers are accepted; other types could lead to other draws, and are refused."""
    x, codec = rng.standard_normal(500).astype(np.float32), compll.compile(name, target)
    payload = codec.encode(x, step=np.int64(7))
    assert np.array_equal(payload, codec.encode(x, step=7))
    expected = codec.decode(payload, 500, step=7)
    assert np.array_equal(expected, codec.decode(payload, 500, step=np.uint32(7)))
    assert not np.array_equal(expected, codec.decode(payload, 500))
    for step, told in (
        (7.0, "whole number, not 7.0"),
        (None, "whole number"),
        (2**63, "not an int64"),
    ):
        with pytest.raises(compll.UsageError, match=told):
            codec.decode(payload, 500, step=step)


def test_rounds_refuse_what_is_no_step_or_number_of_ranks(rng):
    x, codec = rng.standard_normal(500).astype(np.float32), compll.compile("thc", "reference")
    table, at = np.array([[0, 500, 0, 0, 0]]), np.zeros(1, np.int64)
    out = np.zeros(codec.payload_bytes(500), np.uint8)
    for wrong, told in (
        ({"workers": 0}, "0 workers"),
        ({"workers": 2.0}, "workers is a whole number"),
        ({"workers": 2, "step": 0.5}, "step is a whole number"),
        ({"workers": 2, "seed": "a"}, "seed is a whole number"),
    ):
        with pytest.raises(compll.UsageError, match=told):
            codec.encode_round(0, x, table, out, at, **wrong)
        with pytest.raises(compll.UsageError, match=told):
            codec.decode_rounds(x, table, [(out, at)] * len(codec.rounds), **wrong)


GOOD = """name: example
params:
  ratio: 0.1
  residual: true
encode:
  kept: drawn(n * ratio)
  value: g[kept] + 0 * sum(g)
payload:
  value: float32[kept]
rounds: {value: mean}
decode: scatter(indices(kept), value)
feedback: own if residual else none
unbiased: false
"""


@pytest.mark.parametrize(
    "old, new, line, message",
    [
        ("drawn(n * ratio)", "drawn(n * sum(g))", 6, "the size must be known before any data"),
        ("drawn(n * ratio)", "drawn(step)", 6, "the number must hold at every step"),
        ("drawn(n * ratio)", "top(abs(g), n * ratio)", 11, "decode uses 'kept', which the payload"),
        ("drawn(n * ratio)", "1 + count(drawn(9))", 6, "a selection needs a name of its own"),
        ("g[kept] + 0 * sum(g)", "g[kept]", 10, "would not see that a gradient is not finite"),
        ("g[kept] + 0 * sum(g)", "g[kept] + 0 * min(g)", 10, "would not see that a gradient"),
        ("float32[kept]", "int32[kept]", 10, "a round takes float32, float16, bfloat16"),
        ("indices(kept), value", "value, value", 11, "or those of a drawn selection"),
        ("own if residual else none", "mine if residual else none", 12, "'feedback' is one of"),
        ("own if residual else none", "own if n > 9 else none", 12, "from the parameters alone"),
        ("own if residual else none", "own if else none", 12, ""),
        ("own if residual else none", "own if residual", 12, "'feedback' is one of"),
        ("unbiased: false", "unbiased: false if residual else maybe", 13, "'unbiased' is one of"),
        ("unbiased: false", "group: 64", 6, "drawn looks at the whole tensor"),
    ],
)  # fmt: skip
def test_mistakes_are_told(old, new, line, message, tmp_path):
    tells(GOOD, old, new, line, message, tmp_path)


def test_other_selections_do_not_add(tmp_path):
    text = GOOD.replace("drawn(n * ratio)", "top(abs(g), n * ratio)")
    text = text.replace("payload:", "  index: indices(kept)\npayload:\n  index: gaps[kept]")
    text = text.replace("indices(kept), value", "index, value")
    refuses(text, "ranks select different elements", tmp_path)


def test_drawn_selections_without_rounds(tmp_path, rng):
    """Payloads that travel whole; elements that are not sent stay in a state."""
    path = tmp_path / "spec.yaml"
    text = GOOD.replace("rounds: {value: mean}\n", "").replace(" + 0 * sum(g)", "")
    path.write_text(text.replace("own if", "error if"))
    codecs = [compll.compile(path, target) for target in ("cpu", "reference")]
    x = rng.standard_normal(777).astype(np.float32)
    states = [c.init_state(777) for c in codecs]
    payloads = [c.encode(x, state=s, step=4) for c, s in zip(codecs, states, strict=True)]
    assert np.array_equal(*payloads)
    at = shared_positions(4, 0, 0, 777, 77)
    assert len(payloads[0]) == 4 * 77 + 1  # and a status byte: values may not show a NaN
    assert np.array_equal(codecs[0].decode(payloads[0], 777, step=4)[at], x[at])
    assert (states[0]["residual"][at] == 0).all()
    assert np.array_equal(states[0]["residual"], states[1]["residual"])
    held, x[5] = states[0]["residual"].copy(), np.nan
    for codec, state in zip(codecs, states, strict=True):  # a status says so: all is as before
        codec.encode(x, state=state, step=5)
        assert np.array_equal(state["residual"], held)


@pytest.mark.parametrize("key", ["shared(0, 1) < 0.3", "abs(hadamard(g, 64)) > 1"])
@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_grouped_specs_with_whole_arrays_may_only_select(key, target, tmp_path):
    """A spec with selections alone was once compiled in passes, which have no draws."""
    path = tmp_path / "masked.yaml"
    path.write_text(
        f"name: masked\nencode:\n  kept: filter({key})\n  index: indices(kept)\n  v: g[kept]\n"
        "payload: {index: 'gaps[kept]', v: 'float32[kept]'}\ndecode: scatter(index, v)\n"
    )
    codec, x = compll.compile(path, target), np.arange(1, 1001, dtype=np.float32)
    y = codec.decode(codec.encode(x, step=3), len(x), step=3)
    assert 100 < np.count_nonzero(y) < 900
    np.testing.assert_array_equal(y, np.where(y == 0, 0, x))
