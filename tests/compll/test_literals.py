"""Tables that are written down: bucket and lookup at every level, and NF4 made of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from tests.compll.cuda_host.pieces import pieces_equal
from tests.compll.operators import computed
from tests.compll.wrong import refuses

EDGES = (-1.5, 0.0, 1e-3, 2.0, 1e30)
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1.5, 1e-3, 2.0, 3e38], np.float32)

GROUPED = """
name: written
group: 32
encode:
  edges: "[0.5, 1, 2]"
  levels: "[0.25, 1, 3, -2]"
  scale: lookup(levels, bucket(max(abs(g)), edges))
  q: bucket(g * scale, [-1, 0, 1])
payload: {scale: float32, q: "uint2[n]"}
decode: lookup(levels, q) * scale
feedback: error
"""
WHOLE = """
name: written
encode:
  size: lookup([0.5, 1, 2], bucket(mean(abs(g)), [0.1, 10]))
  kept: top(abs(g), max(1, floor(n / 8)))
  index: indices(kept)
  q: bucket(g[kept] / size, [-1, 0, 1])
payload: {size: float32, index: "uint32[kept]", q: "uint2[kept]"}
decode: scatter(index, lookup([-1.5, -0.5, 0.5, 1.5], q) * size)
feedback: error
"""
MATRIX = """
name: written
encode:
  m: matrix(g, 16)
  scale: abs(m) @ ones(16, 1) / 8
  q: bucket(m / scale, [-0.5, 0, 0.5])
payload: {scale: "float32[ceil(n / 16), 1]", q: "uint2[ceil(n / 16), 16]"}
decode: flat(lookup([-0.75, -0.25, 0.25, 0.75], q) * scale)
feedback: error
"""


def written(numbers):
    return ", ".join(f"{x!r}" for x in numbers)


def test_bucket_counts_edges_and_lookup_ends_at_the_last():
    x = np.concatenate([SPECIAL, np.linspace(-3, 3, 90, dtype=np.float32)])
    found = computed(x, f"  y: bucket(g, [{written(EDGES)}]) + 0.0", "{y: 'float32[n]'}")
    edges = np.array(EDGES, np.float32)
    wanted = np.searchsorted(edges, np.where(x == 0, 0, x), side="right")
    wanted[np.isnan(x)] = len(EDGES)
    wanted[np.signbit(x) & (x == 0)] = 1  # -0 lies below 0, as for quantiles' edges
    assert found.tolist() == wanted.tolist()


@settings(max_examples=6, deadline=None)  # each is compiled
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=256), st.data())
def test_lookup_is_the_list(numbers, data):
    index = data.draw(st.lists(st.integers(-300, 300), min_size=1, max_size=20))
    x = np.array(index, np.float32)
    text = f"  y: lookup([{written(numbers)}], int(g))"
    found = computed(x, text, "{y: 'float32[n]'}")
    last = len(numbers) - 1
    assert found.tolist() == [np.float32(numbers[min(max(i, 0), last)]) for i in index]


@pytest.mark.parametrize("text", [GROUPED, WHOLE, MATRIX], ids=["group", "kept", "matrix"])
def test_backends_agree_at_every_level(text, tmp_path, rng):
    pieces_equal(text, tmp_path, rng.standard_normal, on=("cpu", "cuda"))


def test_a_named_table_is_written_as_it_was_given(tmp_path):
    path = tmp_path / "written.yaml"
    path.write_text(GROUPED)
    assert "lookup([0.25, 1, 3, -2], q)" in str(compll.compile(path, "reference").module.decode)


def test_nf4_is_the_nearest_level():
    """All levels but the largest magnitude's own are those of the nearest."""
    x = np.random.default_rng(3).standard_normal((40, 64)).astype(np.float32)
    x[:, 0], x[::2, 1] = 4, -4  # bfloat16s
    x = np.clip(x, -4, 4)
    codec = compll.compile("nf4")
    y = codec.decode(codec.encode(x.reshape(-1)), x.size).reshape(x.shape) / 4
    levels = np.unique(y)
    assert len(levels) == 16
    assert {-1, 0, 1} <= set(levels.tolist())
    nearest = levels[np.abs((x / 4)[..., None] - levels).argmin(-1)]
    assert np.array_equal(nearest, y)


def test_literals_do_not_travel(tmp_path):
    text = (
        "name: w\nencode: {t: '[0, 1]', q: g}\ndecode: q\n"
        "payload: {q: 'float32[n]', t: 'float32[2]'}\n"
    )
    refuses(text, "'t' does not depend on data", tmp_path)
