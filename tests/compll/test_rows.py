"""Reductions over rows and columns of a matrix, on all backends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.backends.cpu import matrices as cpu_matrices
from compll.numerics import matrices as matrix_numbers
from tests.compll.cuda_host.pieces import pieces_equal

TEXT = """name: rows
params: {columns: {type: int, default: 33}}
encode:
  height: ceil(n / columns)
  m: matrix(g, columns)
  low: row_min(m)
  high: row_max(m)
  size: row_sum(abs(m))
  total: column_sum(m)
  near: column_min(abs(m) + ones(height, columns))
  far: column_max(m)
  two: flat(where(m > (low + high) / 2, high, low) + total + far)
payload:
  {two: "float32[n]", size: "float32[height, 1]", near: "float32[1, columns]"}
decode: two + flat(size * near)
"""


@pytest.mark.parametrize("columns", [1, 33, 70])
def test_backends_agree(columns, tmp_path, rng):
    path = tmp_path / "rows.yaml"
    path.write_text(TEXT)
    codecs = [compll.compile(path, target, columns=columns) for target in ("cpu", "reference")]
    for n in (1, 31, 1000, 5000):
        x = rng.standard_normal(n).astype(np.float32)
        for bad in (None, np.nan, -np.inf):
            if bad is not None:
                x[n // 2] = bad
            payloads = [c.encode(x) for c in codecs]
            assert np.array_equal(*payloads)
            assert np.array_equal(*(c.decode(payloads[0], n) for c in codecs), equal_nan=True)


def test_cuda(tmp_path, rng):
    pieces_equal(TEXT, tmp_path, rng.standard_normal, lengths=(4096, 1, 31, 2001))


def test_they_are_what_numpy_says(tmp_path, rng):
    path = tmp_path / "spec.yaml"
    text = "name: norms\nencode: {m: 'matrix(g, 10)', r: row_sum(m), c: column_max(m)}\n"
    text += "payload: {r: 'float32[ceil(n / 10), 1]', c: 'float32[1, 10]'}\ndecode: flat(r + c)\n"
    path.write_text(text)
    x = rng.standard_normal((7, 10)).astype(np.float32)
    codec = compll.compile(path)
    wanted = x.astype(np.float64).sum(1).astype(np.float32)[:, None] + x.max(0)
    found = codec.decode(codec.encode(x.reshape(-1)), 70)
    assert np.allclose(found.reshape(7, 10), wanted, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 150), st.integers(1, 150), st.booleans(), st.booleans(), st.integers(0, 999))
def test_extremes_of_rows_and_columns(rows, cols, turned, largest, seed):
    m = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    m.flat[seed % m.size] = [np.nan, np.inf, -0.0][seed % 3]
    m = m.T if turned else m
    ours, theirs = (f.row_extreme(m, largest) for f in (cpu_matrices, matrix_numbers))
    assert ours.tobytes() == theirs.tobytes()
    if not np.isnan(m).any():
        assert np.array_equal(ours[:, 0], m.max(1) if largest else m.min(1))


@pytest.mark.parametrize("wrong", ["row_sum(g)", "column_max(3)", "ones(n)"])
def test_mistakes_are_told(wrong, tmp_path):
    path = tmp_path / "rows.yaml"
    path.write_text(TEXT.replace("row_sum(abs(m))", wrong))
    with pytest.raises(compll.SpecError, match=wrong.split("(")[0]):
        compll.compile(path, "reference")
