"""Selections among drawn elements, and CocktailSGD made of them."""

import numpy as np
import pytest

import compll
from compll.numerics import draws
from tests.compll.cuda_host.pieces import compiled, decode_alike, pieces_equal
from tests.compll.wrong import refuses

SPEC = """
name: nested
params: {{share: 0.25}}
encode:
  pool: drawn(floor(n * share))
  x: g[pool]
  best: {select}
  index: indices(best)
  value: x[best]
payload: {{index: "{storage}[best]", value: "float32[best]"}}
decode: scatter(indices(pool), {scale} * scatter(index, value))
feedback: error
"""
SELECTS = {
    "top": "top(abs(x), max(1, floor(n / 16)))",
    "filter": "filter(abs(x) > mean(abs(x)))",
    "limited": "filter(x > 0, ceil(n / 16))",
}
CASES = [("top", "gaps"), ("filter", "golomb"), ("limited", "golomb"), ("top", "uint32")]


def text(select, storage, scale="1"):
    return SPEC.format(select=SELECTS[select], storage=storage, scale=scale)


@pytest.mark.parametrize(("select", "storage"), CASES)
def test_backends_agree(select, storage, tmp_path, rng):
    text_ = text(select, storage, scale="0.5")
    pieces_equal(text_, tmp_path, rng.standard_normal, on=("cpu", "cuda"))


def test_a_batch_of_several_pieces_is_decoded_as_each_alone(rng):
    codec, lengths = compll.compile("cocktail"), [3000, 700, 1]
    starts = np.cumsum([0, *lengths[:-1]])
    table = np.array(
        [[s, n, i, 0, s] for i, (s, n) in enumerate(zip(starts, lengths, strict=True))]
    )
    at = np.cumsum([0, *(codec.payload_bytes(n) for n in lengths[:-1])])
    x, y = rng.standard_normal(sum(lengths)).astype(np.float32), np.zeros(3701, np.float32)
    out = np.zeros(sum(map(codec.payload_bytes, lengths)), np.uint8)
    used = codec.encode_batch(x, table, out, at, step=4)
    codec.decode_batch(out, table, at, used, y, step=4)
    for row, a, u in zip(table, at, used, strict=True):
        alone = np.zeros(row[1], np.float32)
        one = np.array([[0, row[1], row[2], 0, 0]])
        own, first = out[a : a + u].copy(), np.zeros(1, np.int64)
        codec.decode_batch(own, one, first, np.array([u]), alone, step=4)
        assert np.array_equal(alone, y[row[0] : row[0] + row[1]])


def damaged(codec, n, last):
    """A payload of uint32 positions, of which the last is another."""
    payload = codec.encode(np.arange(1, n + 1, dtype=np.float32))
    count = max(1, n // 16)
    payload[4 * (count - 1) : 4 * count] = np.array([last], "<u4").view(np.uint8)
    return payload


def test_positions_beyond_the_drawn_elements_are_refused(tmp_path):
    n = 1600
    device, reference = compiled(text("top", "uint32"), tmp_path)
    codecs = device, reference, compll.compile(tmp_path / "spec.yaml", "cpu")
    for last, good in ((n // 4 - 1, True), (n // 4, False), (n - 1, False), (0, False)):
        assert decode_alike(codecs, damaged(reference, n, last), n) == good


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x[best]", "g[best]", "float\\[n\\] has no elements to select"),
        ("drawn(floor(n * share))", "top(abs(g), 9)", "selects among all elements or drawn ones"),
    ],
)
def test_mistakes_are_told(old, new, message, tmp_path):
    refuses(text("top", "gaps").replace(old, new), message, tmp_path)


def test_cocktail_is_the_published_one(rng):
    n, step = 5000, 3
    x = rng.standard_normal(n).astype(np.float32)
    codec = compll.compile("cocktail")
    found = codec.decode(codec.encode(x, step=step), n, step=step)
    pool = draws.shared_positions(step, 0, 0, n, n // 10)
    best = np.sort(pool[np.argsort(-np.abs(x[pool]), kind="stable")[: n // 100]])
    scale = np.abs(x[best]).max()
    wanted = np.zeros(n, np.float32)
    wanted[best] = np.round(x[best] / scale * np.float32(7)) * (scale / np.float32(7))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
