"""Specs that are computed an array at a time, as CUDA source on the CPU: combined operators."""

import numpy as np
import pytest

import compll
from compll.backends.cuda import plans
from compll.backends.cuda import source as cuda_source
from compll.backends.cuda.plans import PlanBuilder
from compll.errors import UsageError
from compll.ir.tile import Call
from compll.numerics.matrices import CHUNK
from compll.passes import lower
from compll.runtime.batches import Encoding
from compll.runtime.library import type_check
from tests.compll.cuda_host.pieces import compiled, pieces_equal

DRAWN = """
name: parts
params: {share: 0.1}
state: {heavy: "float32[n]", mean: float32}
encode:
  some: drawn(ceil(n * share))
  few: drawn(floor(n / 9))
  speed: 0.5 * heavy + g
  v: speed[some] * 2
  low: min(abs(speed))
  top: max(speed[few])
  w: float16(g[few]) + count(few) + top - low + mean
  c: 3 * random(0, 1)
  b: g > 0
  sized: 1000 * abs(g)[some]
payload:
  {v: "float32[some]", w: "bfloat16[few]", c: "uint2[n]", b: "uint1[n]", sized: "uint16[some]",
   low: float16}
decode: scatter(indices(some), v * low + sized)
update: {heavy: "where(some, 0, speed)", mean: "mean(g)"}
"""
SMALL = """
name: small
state: {old: "float32[rows, 4]", flatly: "float32[n]"}
encode:
  rows: ceil(n / 4)
  m: matrix(g, 4)
  t: transpose(m)
  size: sum(abs(m))
  twice: m * 2 + old * (1 / (1 + size)) - max(m)
  e: random_matrix(4, 3)
  few: twice @ e
payload: {twice: "float32[rows, 4]", few: "float16[rows, 3]"}
decode: flat(twice + (few @ transpose(random_matrix(4, 3))) / 4)
update: {old: twice, flatly: "flat(m * m) + flatly"}
"""

WIDE = """
name: wide
encode:
  w: ceil(sqrt(n))
  h: ceil(n / w)
  m: matrix(g + random(0, 1), w)
  a: m @ (transpose(m) @ m)
  b: m @ transpose(m)
payload: {a: "float32[h, w]", b: "float32[h, h]"}
decode: flat(a + b @ a)
"""
BASES = """
name: bases
encode:
  h: ceil(n / 2)
  low: matrix(g, 2) @ random_matrix(2, 4)
  full: orthonormal(low, random_matrix(h, 4))
  part: orthonormal(low)
payload: {full: "float32[h, 4]", part: "float32[h, 4]"}
decode: flat(full @ transpose(orthonormal(transpose(full) @ part)))
"""

MIXED = """
name: mixed
params: {block: {type: int, default: 65536}}
payload: {y: "float32[n]"}
encode: {y: "hadamard(where(shared(0, 1) < 0.5, g, -g), block)"}
decode: hadamard(y * 2, block)
"""


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("text", [DRAWN, SMALL], ids=["drawn", "matrices"])
def test_fields_and_states_of_all_kinds(text, writeback, tmp_path, rng):
    pieces_equal(text, tmp_path, rng.standard_normal, writeback=writeback)


SHIFTED = """
name: shifted
state: {a: "float32[rows, 4]", b: "float32[rows, 4]"}
encode:
  rows: ceil(n / 4)
  y: matrix(g, 4) + a
payload: {y: "float32[rows, 4]"}
decode: flat(y)
update: {b: y, a: b}
"""


def test_states_change_at_once(tmp_path, rng):
    pieces_equal(SHIFTED, tmp_path, rng.standard_normal, lengths=(300, 1, 64))


NARROW = """
name: narrow
encode:
  rows: ceil(n / 4)
  cols: floor(n / 64)
  few: matrix(g, 4) @ random_matrix(4, cols)
payload: {few: "float32[rows, cols]"}
decode: flat(few @ transpose(random_matrix(4, cols)))
"""


def test_dimensions_below_one_are_one(tmp_path, rng):
    pieces_equal(NARROW, tmp_path, rng.standard_normal, lengths=(300, 1, 63, 64))


def test_matrices_that_are_not_finite(tmp_path):
    for bad in (np.nan, np.inf):
        pieces_equal(SMALL, tmp_path, lambda n, bad=bad: np.full(n, bad), lengths=(3, 1030))


def test_products_of_more_than_a_block(tmp_path, rng):
    pieces_equal(WIDE, tmp_path, rng.standard_normal, lengths=(5000, 1, 0, 130))


TALL = """
name: tall
encode:
  h: ceil(n / 5)
  one: ceil(n / n)
  m: matrix(g, 5)
  row: matrix(g, n)
  gram: transpose(m) @ m
  wide: transpose(m) @ random_matrix(h, 70)
  total: row @ ones(n, 1)
  mixed: row @ random_matrix(n, 20)
payload:
  {gram: "float32[5, 5]", wide: "float32[5, 70]", total: "float32[one, 1]",
   mixed: "float32[one, 20]"}
decode: flat(random_matrix(h, 5))
"""


def test_products_of_several_chunks(tmp_path, rng):
    lengths = (5 * 2 * CHUNK + 12, 1, CHUNK, CHUNK + 1, 0)
    pieces_equal(TALL, tmp_path, rng.standard_normal, lengths=lengths)
    codecs = [compll.compile(tmp_path / "spec.yaml", target) for target in ("cpu", "reference")]
    for n in lengths:
        x = rng.standard_normal(n).astype(np.float32)
        np.testing.assert_array_equal(*(codec.encode(x) for codec in codecs))


FACTORS = """
name: factors
encode:
  w: ceil(sqrt(n))
  h: ceil(n / w)
  p: matrix(g, w) @ random_matrix(w, 3)
  q: transpose(matrix(g, w)) @ random_matrix(h, 3)
payload: {{p: "float32[h, 3]", q: "float32[w, 3]"}}
decode: {decode}
feedback: error
"""


@pytest.mark.parametrize(
    "decode",
    [
        "flat(p @ transpose(q)) / max(1, max(p @ transpose(q)))",
        "hadamard(flat(p @ transpose(q)), 64)",
    ],
    ids=["two walks", "a routine"],
)
def test_a_short_product_that_is_stored_for_its_readers(decode, tmp_path, rng):
    text = FACTORS.format(decode=decode)
    lengths = (2001, 1, 64, 1024)
    on = ("cpu", "cuda")
    pieces_equal(text, tmp_path, rng.standard_normal, lengths=lengths, writeback=True, on=on)
    module, _ = type_check(str(tmp_path / "spec.yaml"), {})
    for kernel in lower.kernels(module)["first"]:
        assert all(walk.product is None for walk in kernel.walks)
        assert any(isinstance(s, Call) and s.routine == "product" and s.attr for s in kernel.steps)


def test_chunks_are_added_up_by_themselves(tmp_path):
    """In one sum, all ones beside the large number would be lost."""
    path = tmp_path / "spec.yaml"
    path.write_text(TALL)
    x = np.ones(2 * CHUNK + 1, np.float32)
    x[0], x[-1] = 2.0**60, -(2.0**60)
    for target in ("cpu", "reference"):
        numbers = compll.compile(path, target).encode(x)[:-1].view(np.float32)
        assert CHUNK in numbers


def test_a_tall_matrix_is_shared_by_many_blocks():
    """A single block once walked along a million rows."""
    for name, n in (("atomo", 1 << 26), ("powersgd", 1 << 24)):
        module, params = type_check(name, {"rank": 4})
        code = cuda_source.source(module)
        items = plans.Items(module, params, code.shape.tile)
        blocks = [
            items.count(grid, n)
            for plan in code.plans.values()
            for grid in plan.grids
            if grid.domain.kind == "products"
        ]
        assert max(blocks) > 300


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30, np.nan])
def test_columns_that_depend_on_others(size, tmp_path, rng):
    values = lambda n: size * rng.standard_normal(n)  # noqa: E731
    pieces_equal(BASES, tmp_path, values, lengths=(2600, 1, 5, 64))


@pytest.mark.parametrize("block", [2, 32, 2048, 65536])
def test_transforms_of_more_than_a_block(block, tmp_path, rng):
    sizes = (65536 + 4096 + 33, 1, 0, 3 * 1024 + 7, 16384)
    pieces_equal(MIXED, tmp_path, rng.standard_normal, lengths=sizes, block=block)


DRAWS = """
name: draws
encode:
  few: drawn(ceil(n / 5))
  y: where(shared(0, 1) < 0.5, g, -g) + random(0, 1)
  v: y[few]
payload: {y: "float32[n]", v: "float32[few]"}
decode: scatter(indices(few), v)
"""


@pytest.mark.parametrize("offset", [2**32 - 1500, 2**32 - 1024, 2**33 + 5])
def test_draws_beyond_32_bits(offset, tmp_path, rng):
    device, reference = compiled(DRAWS, tmp_path)
    n = 4000
    x = rng.standard_normal(n).astype(np.float32)
    table, at = np.array([[0, n, 7, offset, 0]]), np.zeros(1, np.int64)
    ours, theirs = np.zeros((2, reference.payload_bytes(n)), np.uint8)
    options = {"seed": 2**64 - 3, "step": 9, "scale": 1.0, "writeback": True}
    decoded, wanted = x.copy(), x.copy()
    device.encode_batch(decoded, table, ours, at, None, Encoding(**options))
    reference.encode_batch(wanted, table, theirs, at, **options)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(decoded, wanted)


def test_a_batch_without_pieces(tmp_path):
    device, _ = compiled(DRAWN, tmp_path)
    none, numbers = np.zeros((0, 5), np.int64), np.zeros(0, np.int64)
    x, out = np.zeros(0, np.float32), np.zeros(0, np.uint8)
    options = {"seed": 0, "step": 0, "scale": 1, "writeback": True}
    state = {"heavy": x, "mean": np.zeros(1, np.float32)}
    for held in (None, state):
        assert len(device.encode_batch(x, none, out, numbers, held, Encoding(**options))) == 0
    device.decode_batch(out, none, numbers, numbers, x, add=True)


def test_pieces_of_one_tensor_do_not_share_a_number(tmp_path):
    device, reference = compiled(DRAWN, tmp_path)
    table, n = np.array([[0, 64, 1, 0, 0], [64, 64, 1, 64, 64]]), 128
    state = {name: s.copy() for name, s in reference.init_state(n, 2).items()}
    out, options = np.zeros(4000, np.uint8), {"seed": 0, "step": 0, "scale": 1, "writeback": False}
    x = np.zeros(n, np.float32)
    with pytest.raises(UsageError, match="separate calls"):
        device.encode_batch(x, table, out, np.array([0, 2000]), state, Encoding(**options))


@pytest.mark.parametrize(
    "old, new",
    [
        ("drawn(floor(n / 9))", "top(abs(g), ceil(n / 9))"),
        ("drawn(floor(n / 9))", "filter(g > 1)"),
        ("min(abs(speed))", "kth_largest(abs(speed), 3)"),
        ("min(abs(speed))", "bisect(abs(speed), 0, 3, n / 9, n / 8, 20)"),
    ],
)
def test_thresholds_and_selections_beside_drawn_ones(old, new, tmp_path, rng):
    pieces_equal(DRAWN.replace(old, new), tmp_path, rng.standard_normal, lengths=(2001, 1, 31))


def test_a_matrix_without_room_is_told_as_by_the_reference(tmp_path):
    text = SMALL.replace("(4, 3)", "(4, columns)").replace("rows, 3", "rows, columns")
    text = text.replace("  m: matrix", "  columns: 2 + n * n\n  m: matrix")
    text = text.replace(" + (few @ transpose(random_matrix(4, columns))) / 4", "")
    device, reference = compiled(text, tmp_path)
    n = 2000
    table, at, x = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64), np.zeros(n, np.float32)
    out, options = np.zeros(9, np.uint8), {"seed": 0, "step": 0, "scale": 1, "writeback": False}
    with pytest.raises(UsageError, match=r"a matrix of (4|500) x 4000002"):
        device.encode_batch(x, table, out, at, None, Encoding(**options))
    with pytest.raises(UsageError, match=r"a matrix of (4|500) x 4000002"):
        reference.backend.encode_batch(x, table, out, at, None, Encoding(**options))


ROWS = """name: rowsign
encode:
  m: matrix(g, 48)
  scale: abs(m) @ ones(48, 1) / 16
  negative: m < 0
  q: min(7, floor(abs(m) / scale * 7))
payload:
  scale: float32[ceil(n / 48), 1]
  negative: uint1[ceil(n / 48), 48]
  q: uint3[ceil(n / 48), 48]
decode: flat(where(negative, -q, q) * scale / 7)
feedback: error
"""


def test_codes_of_a_matrix_that_are_read_flat(tmp_path, rng):
    """Unused codes of the last tile were once read as if all belonged to elements."""
    pieces_equal(ROWS, tmp_path, rng.standard_normal, lengths=(2000, 1, 31, 48, 1024, 300))


SAMPLES = """
name: samples
encode:
  r: random(0, 1)
  s: kth_largest(sample(abs(g), 100), 5)
  t: kth_largest(sample(abs(g), max(1, floor(n / 2))), 5)
  u: kth_largest(sample(r * abs(g), 100), 5)
  v: kth_largest(sample(r * abs(g), max(1, floor(n / 2))), 5)
payload: {s: float32, t: float32, u: float32, v: float32}
decode: s + t + u + v
"""
KEYS = """
name: keys
encode:
  t: kth_largest(abs(g), 3)
  keys: where(abs(g) >= t, 1, 2)
payload: {t: float32, keys: "huffman[2][n]"}
decode: keys * t
"""
POINTERS = """
name: pointers
encode:
  x: where(g > 0, 1, 2)
  x_p: where(g > 1, 1, 2)
payload: {x: "huffman[2][n]", x_p: "huffman[2][n]"}
decode: x + x_p
"""


@pytest.mark.parametrize("text", [SAMPLES, KEYS, POINTERS], ids=["samples", "keys", "pointers"])
def test_scratch_memory_of_equal_names(text, tmp_path, rng):
    """Samples of two searches, an array of a field's name, and a pointer of one."""
    pieces_equal(text, tmp_path, rng.standard_normal)


def test_memory_of_a_name_has_one_size(tmp_path):
    module = compiled(KEYS, tmp_path)[1].module
    (kernel, *_) = lower.kernels(module)["first"]
    plan = PlanBuilder("encode", kernel, plans.shape_of(1024), ())
    assert plan.memory("one", "int32", 0, 2) == plan.memory("one", "int32", 0, 2)
    with pytest.raises(AssertionError, match="one"):
        plan.memory("one", "int32", 0, 3)
