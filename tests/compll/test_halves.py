"""States of 16 bits: error feedback's residual as bfloat16, and declared states."""

import itertools

import numpy as np
import pytest

import compll
from compll.numerics import halves
from compll.tools.explain import encode_traffic
from tests.compll.cuda_host.pieces import pieces_equal
from tests.tiers import first_fast

KINDS = ("bfloat16", "float16")
MOMENTUM = """
name: heavy
about: Momentum in 16 bits; what is selected leaves it.
state:
  m: "{storage}[n]"
  seen: "{other}[n]"
encode:
  v: 0.9 * m + g
  kept: filter(abs(v) > 1, n)
  index: indices(kept)
  value: v[kept]
payload:
  index: gaps[kept]
  value: float32[kept]
decode: scatter(index, value)
update:
  m: where(kept, v / 8, v)
  seen: where(kept, seen + 1, seen)
"""
SUM = """
name: total
about: The sum so far, of all gradients.
state:
  m: {storage}[n]
encode:
  q: m + g
payload:
  q: float32[n]
decode: q
update:
  m: m + g
"""
BY_CONDITION = """
name: some
about: Error feedback on request.
params:
  feed: false
encode:
  q: g
payload:
  q: float16[n]
decode: q
feedback: error if feed else none
"""


def spec(folder, text):
    path = folder / "spec.yaml"
    path.write_text(text)
    return path


def test_a_bfloat16_residual_takes_half_the_memory_and_leaves_the_rest_as_it_is():
    usual = compll.compile("onebit_group")
    codec = compll.compile("onebit_group", residual="bfloat16")
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    state, whole = codec.init_state(5000), usual.init_state(5000)
    assert 2 * state["residual"].nbytes == whole["residual"].nbytes
    assert np.array_equal(codec.encode(x, state=state), usual.encode(x, state=whole))
    kept = halves.read(state["residual"])
    assert np.array_equal(state["residual"], halves.stored(whole["residual"], np.dtype("uint16")))
    assert np.allclose(kept, whole["residual"], rtol=2.0**-8)
    assert codec.digest == usual.digest
    assert "residual='bfloat16'" in repr(codec)
    assert usual is compll.compile("onebit_group")
    assert compll.compile("onebit_group", residual="float32").params == usual.params


def test_traffic_counts_two_bytes():
    moved = [
        encode_traffic(compll.compile(name, "reference", residual=r).module).moved
        for name in ("onebit_group", "powersgd")
        for r in ("float32", "bfloat16")
    ]
    assert moved[1] == moved[0] - 4
    assert moved[3] < moved[2]


def test_the_caller_is_told_of_a_state_of_another_type():
    halved, usual = [
        compll.compile("onebit_group", residual=each) for each in ("bfloat16", "float32")
    ]
    x = np.ones(9, np.float32)
    with pytest.raises(compll.UsageError, match=r"bfloat16, .* uint16 .*, not float32"):
        halved.encode(x, state=usual.init_state(9))
    with pytest.raises(compll.UsageError, match=r"float32, .* float32 .*, not uint16"):
        usual.encode(x, state=halved.init_state(9))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("onebit", "float16", "parameter 'residual' is one of float32, bfloat16, not 'float16'"),
        ("onebit", True, "parameter 'residual' is str, not True"),
        ("signsgd", "bfloat16", "signsgd has no parameter 'residual'"),
        ("randomk", "bfloat16", "parameter 'residual' is bool, not 'bfloat16'"),
    ],
)
def test_a_state_other_than_a_residual_is_refused(name, value, message):
    with pytest.raises(compll.SpecError, match=message):
        compll.compile(name, residual=value)


@pytest.mark.slow
def test_no_residual_where_a_condition_leaves_feedback_out(tmp_path):
    path = spec(tmp_path, BY_CONDITION)
    with pytest.raises(compll.SpecError, match="with these parameters some has no error feedback"):
        compll.compile(path, residual="bfloat16")
    state = compll.compile(path, feed=True, residual="bfloat16").init_state(3)
    assert state["residual"].nbytes == 6


@pytest.mark.parametrize("on, storage", first_fast(itertools.product(("cuda", "cpu"), KINDS)))
@pytest.mark.parametrize("text", [MOMENTUM, SUM], ids=["selection", "sum"])
def test_declared_states(on, storage, text, tmp_path):
    rng = np.random.default_rng(2)

    def values(n):
        x = rng.standard_normal(n)
        x[::97], x[5::101], x[7::301] = 65519.9, 3.4e38, np.nan
        return x

    text = text.replace("{storage}", storage).replace("{other}", "float16")
    pieces_equal(text, tmp_path, values, on=[on])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_a_state_is_rounded_and_keeps_its_value_where_the_new_one_is_too_large(tmp_path, storage):
    codec = compll.compile(spec(tmp_path, SUM.format(storage=storage)))
    most = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep47")}[storage]
    tie = 1 + {"float16": 2.0**-11, "bfloat16": 2.0**-8}[storage]  # to even: down
    x = np.array([tie, np.float32(most), 3 * tie, 1e-45, -0.0], np.float32)
    state = codec.init_state(5)
    assert state["m"].itemsize == 2
    codec.encode(x, state=state)
    first = halves.read(state["m"])
    assert first[:2].tolist() == [1.0, np.float32(most)]
    codec.encode(x, state=state)
    second = halves.read(state["m"])
    assert second[1] == np.float32(most)
    assert second[0] == 2.0
    assert abs(second[2] - 6 * tie) < 0.05


def test_states_of_16_bits_are_of_elements(tmp_path):
    for kind in ("bfloat16", "bfloat16[2, 3]", "uint8[n]"):
        with pytest.raises(compll.SpecError) as told:
            compll.compile(spec(tmp_path, SUM.replace("{storage}[n]", f"'{kind}'")))
        assert "is float32, float32[n] or float32[rows, columns]" in str(told.value)
        assert "bfloat16[n] and float16[n] keep 16 bits per element" in str(told.value)


def test_error_feedback_loses_nothing_that_bfloat16_can_tell():
    """200 steps of sums: sent values follow the gradients as with a float32 residual."""
    n, rng = 4096, np.random.default_rng(3)
    grads = rng.standard_normal((200, n)).astype(np.float32) + np.float32(0.1)
    gone = {}
    for residual in ("float32", "bfloat16"):
        codec = compll.compile("onebit_group", residual=residual)
        state, sent = codec.init_state(n), np.zeros(n)
        for step, g in enumerate(grads):
            sent += codec.decode(codec.encode(g, state=state, step=step), n)
        gone[residual] = np.abs(sent - grads.sum(0, dtype=np.float64))
    assert gone["bfloat16"].mean() < 1.1 * gone["float32"].mean()
    assert gone["bfloat16"].max() < 1.3 * gone["float32"].max()
