"""Selections in grouped specs: AdaComp against plain NumPy, and values that depend on a group."""

import numpy as np
import pytest

import compll
from tests.compll.cuda_host.pieces import pieces_equal
from tests.compll.wrong import refuses
from tests.tiers import first_fast

SCALED = """
name: scaled
group: 32
state: {r: "float32[n]", m: "float32[n]"}
encode:
  acc: r + g
  top: max(abs(acc))
  mean_: mean(abs(acc))
  kept: filter(abs(acc) + 0.1 * random(0, 1) >= 0.8 * top, LIMIT)
  index: indices(kept)
  code: round(acc / top * 7) + 8 + count(acc > 0) % 2
  level: code[kept]
  part: (acc / mean_)[kept]
  far: m[kept] + random(0, 1)[kept]
payload:
  index: INDEX[kept]
  level: uint4[kept]
  part: float32[kept]
  far: float32[kept]
  top: float32
decode: scatter(index, part * (level - 8) + far)
update:
  r: where(kept, acc - top / acc, acc)
  m: where(kept, 0.5 * g, m + mean_)
"""


def adacomp(g, residual, size):
    """A step of AdaComp by the paper's algorithm, without its quantizer: sent, new residual."""
    held = residual + g
    ahead, sent = held + g, np.zeros_like(g)
    for start in range(0, len(g), size):
        part = slice(start, start + size)
        chosen = np.abs(ahead[part]) >= np.abs(held[part]).max()
        sent[part] = np.where(chosen, held[part], 0)
    return sent, held - sent


@pytest.mark.parametrize("size", first_fast([512, 32]))
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_adacomp(backend, size):
    rng = np.random.default_rng(0)
    n = 5 * size + 17
    codec = compll.compile("adacomp", backend, bin=size)
    residual, state = np.zeros(n, np.float32), codec.init_state(n)
    for _ in range(6):
        g = rng.laplace(size=n).astype(np.float32)
        g[size : 2 * size] = 0
        sent, residual = adacomp(g, residual, size)
        payload = codec.encode(g, state=state)
        np.testing.assert_array_equal(codec.decode(payload, n), sent)
        np.testing.assert_array_equal(state["r"], residual)
        assert 0 < np.count_nonzero(sent) < 0.5 * n


def test_adacomp_sends_nothing_of_a_bin_of_zeros():
    codec = compll.compile("adacomp", "cpu")
    x = np.zeros(512 * 10, np.float32)
    x[700] = 1
    assert len(codec.encode(x)) < 24


@pytest.mark.parametrize("on", first_fast(["cuda", "cpu"]))
@pytest.mark.parametrize(
    "group, limit, index",
    first_fast([(32, "9", "golomb"), (8, "n", "gaps"), (512, "n", "uint32"), (4096, "n", "gaps")]),
)
def test_values_of_groups_at_selected_elements(group, limit, index, on, tmp_path, rng):
    text = SCALED.replace("INDEX", index).replace("LIMIT", limit)
    text = text.replace("group: 32", f"group: {group}")
    x = rng.standard_normal(20_000)
    x[100:400] = 0  # groups of zeros: 0 / 0 in the values and states
    lengths = (9000, 1, 33, 0, 2048)
    pieces_equal(text, tmp_path, lambda n: x[:n], lengths=lengths, on=[on])


DRAWN = """
name: drawn
GROUP
state: {r: "float32[n]"}
encode:
  acc: r + g
  top: max(abs(acc))
  kept: filter(abs(acc) > 0.5 * top, n)
  index: indices(kept)
  level: floor(abs(acc) / top * 3 + random(0, 1))[kept]
payload: {index: "gaps[kept]", level: "uint2[kept]", top: float32}
decode: scatter(index, level)
update: {r: "UPDATE"}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "group, update",
    [("", "where(kept, acc * random(0, 1), acc)"), ("group: 64", "acc")],
)
def test_a_selection_may_draw_alone(tmp_path, group, update, rng):
    text = DRAWN.replace("GROUP", group).replace("UPDATE", update)
    pieces_equal(text, tmp_path, rng.standard_normal, on=("cpu", "cuda"))


@pytest.mark.parametrize(
    "before, after, message",
    [
        (
            "filter(abs(acc) + 0.1 * random(0, 1) >= 0.8 * top, LIMIT)",
            "top(acc, 9)",
            "top looks at(.|\n)*top_columns",
        ),
        (
            "(acc / mean_)[kept]",
            "acc[kept] / mean_",
            "a value per group does not go(.|\n)*\\[kept\\]",
        ),
        ("m[kept] + ", "count(kept) + ", "count of a selection looks at the whole tensor"),
        ("m[kept] + ", "sum(m[kept]) + ", "sum of selected elements looks at the whole tensor"),
        ("part * (level", "top * (level", "a value per group does not go(.|\n)*top_columns"),
    ],
)
def test_limits_of_grouped_selections(tmp_path, before, after, message):
    text = SCALED.replace(before, after).replace("INDEX", "gaps").replace("LIMIT", "n")
    refuses(text, message, tmp_path)
