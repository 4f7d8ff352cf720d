"""Parameters that follow from a tensor's shape."""

import numpy as np
import pytest

import compll
from compll.errors import UsageError
from tests.compll.wrong import problems

SPEC = """\
name: rowwise
params:
  columns: {type: int, default: 4, min: 2, max: 100, from: columns}
  lines: {type: int, default: 1, from: rows}
encode:
  m: matrix(g, columns)
  scale: g * lines
payload: {scale: "float32[n]"}
decode: scale / lines
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "rowwise.yaml"
    path.write_text(SPEC)
    return path


@pytest.mark.parametrize(
    "shape, columns, lines",
    [((3, 5), 5, 3), ((2, 3, 4), 12, 2), ((7,), 4, 7), ((), 4, 1), ((2, 101), 4, 2)],
)
def test_parameters_follow_from_the_shape_within_their_limits(spec, shape, columns, lines):
    own = compll.compile(spec, "reference").for_shape(shape)
    assert own.params == {"columns": columns, "lines": lines}


def test_given_parameters_do_not_follow_the_shape(spec):
    codec = compll.compile(spec, "reference", columns=7)
    assert codec.for_shape((3, 5)).params == {"columns": 7, "lines": 3}
    codec = compll.compile(spec, "reference", columns=7, lines=2)
    assert codec.for_shape((3, 5)) is codec


def test_codecs_of_one_shape_are_one_and_digests_tell_shapes_apart(spec):
    codec = compll.compile(spec, "reference")
    assert codec.for_shape((3, 5)) is codec.for_shape((3, 5))
    assert codec.for_shape((3, 5)).digest != codec.for_shape((3, 6)).digest
    x = np.arange(15, dtype=np.float32)
    assert np.allclose(codec.for_shape((3, 5)).decode(codec.for_shape((3, 5)).encode(x), 15), x)


@pytest.mark.parametrize("name", [n for n in compll.list_specs() if n != "powersgd"])
def test_other_specs_know_no_shape(name):
    codec = compll.compile(name, "reference")
    assert codec.for_shape((30, 50)) is codec


def test_powersgd_takes_the_matrix_of_the_parameter():
    codec = compll.compile("powersgd", "reference", rank=4)
    assert codec.for_shape((300, 50)).payload_bytes(15000) == 4 * 4 * (300 + 50)
    assert codec.for_shape((300, 10, 5)).payload_bytes(15000) == 4 * 4 * (300 + 50)
    assert not codec.for_shape((15000,)).suits(15000)  # as PyTorch's hook leaves vectors alone


@pytest.mark.parametrize(
    "old, new, line, column, message",
    [
        ("from: rows", "from: row", 4, 40, "'from' is one of rows, columns, not 'row'"),
        ("from: rows", "from: [rows]", 4, 40, "'from' is one of rows, columns"),
        (
            "type: int, default: 1, from: rows",
            "type: float, default: 1, from: rows",
            4,
            36,
            "rows are a whole number, parameter 'lines' is float",
        ),
    ],
)
def test_a_wrong_from_is_told(old, new, line, column, message, tmp_path):
    (only,) = problems(SPEC.replace(old, new), tmp_path)
    assert message in only.message
    assert (only.span.line, only.span.col) == (line, column)


def test_shapes_may_be_arrays_of_numpy(spec):
    codec = compll.compile(spec, "reference")
    for shape in (np.array([3, 5]), [np.int64(3), np.int32(5)]):
        assert codec.for_shape(shape) is codec.for_shape((3, 5))


@pytest.mark.parametrize("shape", [None, 15, (3, 5.0), "35", (3, None), (3, -5)])
@pytest.mark.parametrize("name", ["powersgd", "onebit"])
def test_a_malformed_shape_is_refused(name, shape):
    with pytest.raises(compll.UsageError, match=f"{name}: a shape"):
        compll.compile(name, "reference").for_shape(shape)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_a_matrix_of_more_elements_than_positions_count_is_refused(target, tmp_path):
    """Positions are int32: from element 2**31 on a kernel once read before the gradient."""
    path = tmp_path / "lanes.yaml"
    path.write_text(
        "name: lanes\nencode:\n  m: matrix(g, 60 * n)\n  s: sum(abs(m))\n"
        "payload: {s: float32}\ndecode: s + 0 * n\n"
    )
    codec = compll.compile(path, target)
    with pytest.raises(UsageError, match=r"1 x 2160000000 .* positions are int32"):
        codec.encode(np.zeros(36_000_000, np.float32))  # memory that nobody touches


def test_nor_one_of_a_tensor_of_almost_as_many():
    backend = compll.compile("powersgd", "cpu").backend
    (kernel, *_) = [k for k in backend.by_name.values() if k.matrices]
    assert backend.array_bytes(kernel, 2**30) > 2**32
    with pytest.raises(UsageError, match=r"46341 x 46341 .* encode the tensor in parts"):
        backend.array_bytes(kernel, 2**31 - 1)
