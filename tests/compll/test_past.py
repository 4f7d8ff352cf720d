"""Results written past the cache: all of them, at any alignment, and no bytes beside them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.backends.cpu import instructions, jit, walks
from compll.backends.cpu.backend import TileKernels

LINE = 16  # elements
BESIDE = 100  # elements before and after the result that must stay as they are


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    """Kernels that store past the cache for any number of elements, by their spec's name."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("past")
        for name in ("usual", "folder", "spare"):
            patch.setattr(jit, name, lambda kind: folder)
        for module in (instructions, walks):
            patch.setattr(module, "gains", lambda: True)
        patch.setattr(instructions, "PAST", 256)  # more than a line
        found = {}
        for name in ("none", "int8_group", "topk"):
            codec = compll.compile(name, "reference")
            found[name] = codec, TileKernels(codec.module, codec.params)
        return found


def within(n, skew):
    """An array of n elements that begins `skew` after a line's begin, and the array around it."""
    whole = np.full(n + 2 * BESIDE + LINE, 7, np.float32)
    begin = BESIDE + (-(whole.ctypes.data // 4 + BESIDE)) % LINE + skew
    return whole[begin : begin + n], whole


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 3000),
    skew=st.integers(0, LINE - 1),
    name=st.sampled_from(["none", "int8_group", "topk"]),
)
def test_every_element_is_written_and_no_other(past, n, skew, name):
    codec, kernels = past[name]
    payload = codec.encode(np.random.default_rng(n).standard_normal(n, dtype=np.float32) + 9)
    table, at, used = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64), np.array([len(payload)])
    x, whole = within(n, skew)
    kernels.decode_batch(payload, table, at, used, x, add=False)
    assert np.array_equal(x, codec.decode(payload, n))
    assert np.count_nonzero(whole == 7) == len(whole) - n


@pytest.mark.parametrize("name", ["none", "onebit_group", "int8_group", "threelc", "dgc"])
def test_large_results_are_what_is_added(name):
    n = instructions.PAST // 4 + 1337
    codec = compll.compile(name)
    payload = codec.encode(np.random.default_rng(0).standard_normal(n, dtype=np.float32))
    added = np.zeros(n, np.float32)
    codec.decode_add(payload, added)
    assert np.array_equal(codec.decode(payload, n), added)
    for skew in (0, 5):
        x, whole = within(n, skew)
        codec.decode_batch(
            payload,
            np.array([[0, n, 0, 0, 0]]),
            np.zeros(1, np.int64),
            np.array([len(payload)]),
            x,
        )
        assert np.array_equal(x, added)
        assert np.count_nonzero(whole == 7) == len(whole) - n


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_large_payloads_are_those_of_the_reference(name):
    codec = compll.compile(name)
    n = instructions.PAST // codec.payload_bytes(1) + 1337
    x = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    meant = compll.compile(name, "reference").encode(x)
    for skew in (0, 1, 63):
        room = np.full(len(meant) + 3 * BESIDE, 7, np.uint8)
        begin = -room.ctypes.data % (4 * LINE) + skew
        codec.encode_batch(x, np.array([[0, n, 0, 0, 0]]), room, np.array([begin]))
        assert np.array_equal(room[begin : begin + len(meant)], meant)
        assert (room[:begin] == 7).all()
        assert (room[begin + len(meant) :] == 7).all()
