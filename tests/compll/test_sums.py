"""Sums by index, rows, and integers of floats: a count sketch, on every backend."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import compll
from compll.backends.cuda.calls import SUMMED
from compll.numerics import numbers
from tests.compll.cuda_host.pieces import pieces_equal
from tests.compll.world import World
from tests.compll.wrong import problems, refuses

SKETCH = """
name: rows
params: {ratio: 0.1, share: 1.0}
state: {row: "float32[1, width]", moved: "float32[n]"}
encode:
  width: ceil(n * ratio)
  place: int(shared(0, width))
  sign: where(shared(0, 1) < 0.5, -1, 1)
  sums: sum_by(place, sign * g + moved, width)
payload: {sums: "float32[1, width]"}
rounds: {sums: mean}
decode: sign * lookup(sums, place) * share
feedback: own
update: {row: combined(sums) + row / 2, moved: "lookup(row, place + 1) - moved"}
"""
ALL = """
name: whole
GROUP
encode:
  m: max(abs(g))
  i: int(100 * g / m)
  k: int(-m)
  h: int(random(0, 4))
payload: {i: "int32[n]", k: float32, h: "uint2[n]"}
decode: i * 2 + int(k / 2) + (h & 1)
"""


def codecs(text, folder, **params):
    path = folder / "own.yaml"
    path.write_text(text)
    return [compll.compile(path, target, **params) for target in ("reference", "cpu")]


@pytest.mark.parametrize("writeback", [False, True])
def test_backends_agree(writeback, tmp_path, rng):
    for size in (1.0, 1e-40, 1e30, 0.0, np.nan):
        values = lambda n, size=size: size * rng.standard_normal(n)  # noqa: E731
        pieces_equal(SKETCH, tmp_path, values, writeback=writeback, on=("cpu", "cuda"))


@pytest.mark.parametrize("ratio", [0.01, 0.2])
def test_several_blocks_add_up_a_row(ratio, tmp_path, rng):
    """In shared memory first, if the row is short."""
    lengths = (2 * SUMMED + 100, 31)
    assert (ratio * lengths[0] > 1024) == (ratio == 0.2)  # FEW of arrays.cuh
    pieces_equal(SKETCH, tmp_path, rng.standard_normal, lengths=lengths, ratio=ratio)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_reach_all_ranks(bad, tmp_path, rng):
    for codec in codecs(SKETCH, tmp_path):
        assert not codec.module.status
        x = rng.standard_normal(1000).astype(np.float32)
        x[77] = bad
        assert np.isnan(codec.decode(codec.encode(x), len(x))).all()


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_sums_are_near_and_in_any_order(data):
    n, size = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 9))
    x = data.draw(arrays.arrays(np.float32, n, elements=FLOATS))
    index = data.draw(arrays.arrays(np.int32, n, elements=st.integers(-2, size + 2)))
    order = np.array(data.draw(st.permutations(range(n))), np.int64)
    with np.errstate(over="ignore"):
        row = numbers.sum_by(index, x, size)
        np.testing.assert_array_equal(numbers.sum_by(index[order], x[order], size), row)
    lost = n * 2.0**-50 * float(np.abs(x).max(initial=0))
    for j in range(size):
        exact = math.fsum(x[np.clip(index, 0, size - 1) == j].tolist())
        with np.errstate(over="ignore"):
            low, high = np.float32(exact - lost), np.float32(exact + lost)
        assert low <= row[j] <= high


@pytest.mark.slow
def test_a_sketch_is_right_on_average(tmp_path, rng):
    """Without feedback, the error falls with the square root of the number of steps."""
    n, steps = 500, 1000
    text = SKETCH.replace("feedback: own\n", "").replace(" + moved, width", ", width")
    _, codec = codecs(text, tmp_path)
    x = rng.standard_normal(n).astype(np.float32)
    found = [codec.decode(codec.encode(x, step=s), n, step=s) for s in range(steps)]
    error = np.linalg.norm(np.mean(found, axis=0) - x) / np.linalg.norm(x)
    assert error < 1.3 * math.sqrt(10 / steps)


def test_sums_of_ranks_add(tmp_path, rng):
    """The mean of the ranks' rows is the row of their mean."""
    _, codec = codecs(SKETCH, tmp_path)
    xs = rng.standard_normal((3, 2000)).astype(np.float32)
    rows = [codec.encode(x, step=5).view(np.float32) for x in xs]
    mean = codec.encode(xs.mean(0), step=5).view(np.float32)
    np.testing.assert_allclose(np.mean(rows, 0), mean, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_averages_with_feedback_follow_the_mean(target, tmp_path, rng):
    """With feedback; only a share of each estimate is applied, so residuals do not grow."""
    n, steps = 600, 300
    text = SKETCH.replace(" + moved, width", ", width").replace("1.0", "0.09")
    path = tmp_path / "own.yaml"
    path.write_text(text)
    world = World(path, 3, n, target)
    given = rng.standard_normal((3, n)).astype(np.float32)
    got = np.sum([world.step(list(given), step) for step in range(steps)], axis=0)
    error = np.linalg.norm(got / steps - given.mean(0)) / np.linalg.norm(given.mean(0))
    assert error < 0.2
    for state, x in zip(world.states, given, strict=True):
        assert np.linalg.norm(state["residual"]) < 30 * np.linalg.norm(x)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "group: 32"])
def test_integers_of_floats(group, tmp_path, rng):
    text = ALL.replace("GROUP", group)
    x = rng.standard_normal(1000).astype(np.float32)
    one, two = codecs(text, tmp_path)
    assert bytes(one.encode(x)) == bytes(two.encode(x))
    m = np.abs(x).max() if not group else np.repeat(
        [np.abs(x[i : i + 32]).max() for i in range(0, 1000, 32)], 32)[:1000]  # fmt: skip
    y = one.decode(one.encode(x), 1000)
    wanted = 2 * np.trunc(np.float32(100) * x / m) + np.trunc(np.trunc(-m) / 2)
    assert set((y - wanted).tolist()) == {0.0, 1.0}
    np.testing.assert_array_equal(two.decode(two.encode(x), 1000), y)
    pieces_equal(text, tmp_path, rng.standard_normal)


ODD = {"nan": 0, "inf": 0, "-inf": 0, "3e9": 2**31 - 1, "-3e9": -(2**31), "-0.9": 0, "2.9": 2}


@pytest.mark.slow
def test_integers_of_what_no_integer_holds(tmp_path):
    """The largest integer of an element is the largest float32 below 2**31."""
    kinds = {"a": ("int({} + 0 * g)", "int32[n]"), "b": ("int({} + 0 * sum(g))", "float32"),
             "c": ("int({})", "float32")}  # fmt: skip
    names = {f"{kind}{i}": (kind, x) for kind in kinds for i, x in enumerate(ODD)}
    encode = "".join(f"  {name}: {kinds[k][0].format(x)}\n" for name, (k, x) in names.items())
    payload = "".join(f"  {name}: {kinds[kind][1]}\n" for name, (kind, _) in names.items())
    decode = " + ".join(names)
    text = f"name: odd\nencode:\n{encode}payload:\n{payload}decode: {decode}\n"
    for codec in codecs(text, tmp_path):
        found = codec.encode(np.zeros(3, np.float32))[: 4 * 5 * len(ODD)]
        elements, scalars, _ = np.split(found.view(np.int32), [3 * len(ODD), 4 * len(ODD)])
        assert elements.tolist() == [min(one, 2**31 - 128) for one in ODD.values() for _ in "123"]
        assert scalars.view(np.float32).tolist() == np.float32([*ODD.values()]).tolist()
    pieces_equal(text, tmp_path, np.zeros)


ERRORS = {
    "sum_by(g, g, 9)": "sum_by takes integers first, not float[n]",
    "sum_by(int(g), g, 0)": "at least one row and column",
    "sum_by(int(g), g, 2.5)": "rows and columns are whole numbers",
    "sum_by(int(g), g, mean(g))": "rows and columns are whole numbers",
    "sum_by(int(g), matrix(g, 3), 9)": "sum_by looks at every element, not at float[",
    "sum_by(int(g), g[k], 9)": "sum_by looks at every element, not at float[k]",
    "lookup(matrix(g, 3), int(g))": "lookup takes a table or a row, not float[",
    "lookup(sum_by(int(g), g, 9), g)": "lookup takes an integer, not float[n]",
    "lookup(g, int(g))": "lookup takes a table or a row, not float[n]",
    "int(k)": "int takes numbers, not a selection",
}


@pytest.mark.parametrize("expression, words", ERRORS.items())
def test_mistakes(expression, words, tmp_path):
    text = f'name: wrong\nencode: {{k: drawn(3), r: "{expression}"}}\npayload: {{r: float32}}\n'
    found = problems(text + "decode: r", tmp_path)
    assert any(words in f"{d.message} {d.hint}" for d in found)
    assert found[0].span.line == 2


def test_grouped_specs_have_no_rows(tmp_path):
    text = 'name: wrong\ngroup: 8\nencode: {r: "sum_by(int(g), g, 9)"}\npayload: {r: float32}\n'
    refuses(text + "decode: r", "a grouped spec has no rows", tmp_path)
