"""Results written past the cache: all of them, at any alignment, and nothing beside them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

import compll
from compll.backends.cpu import nontemporal_stores as cpu_past
from compll.backends.cpu import nontemporal_tiles as cpu_pour
from compll.backends.cpu.nontemporal_stores import (
    settle,
    write_past,
    written_to,
    zeros_past,
)

LINE = cpu_pour.LINE // 4
BESIDE = 100  # elements before and after the result that must stay as they are


@njit
def by_tiles(source, x, tile, block):
    """x = source as generated kernels write it."""
    room = np.empty(2 * block + 3 * LINE, np.float32)
    into = written_to(x, room, True)
    gone, stop = 0, block
    full = len(x) - len(x) % tile
    for o in range(0, full, tile):
        into[o - gone : o - gone + tile] = source[o : o + tile]
        if o + tile == stop:
            write_past(x, stop, room, block)
            gone = stop - (stop // block & 1) * (block + LINE)
            stop += block
    settle(x, full, room, block)
    x[full:] = source[full:]


@njit
def zeros(x):
    zeros_past(x)


def within(n, skew):
    """An array of n elements, `skew` after the begin of a line, and what it lies in."""
    whole = np.full(n + 2 * BESIDE + LINE, 7, np.float32)
    begin = BESIDE + (-(whole.ctypes.data // 4 + BESIDE)) % LINE + skew
    return whole[begin : begin + n], whole


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(0, 700),
    skew=st.integers(0, LINE - 1),
    tile=st.sampled_from([16, 32, 64]),
    tiles=st.integers(1, 4),
)
def test_every_element_is_written_and_no_other(n, skew, tile, tiles):
    x, whole = within(n, skew)
    source = np.arange(n, dtype=np.float32) + 100
    by_tiles(source, x, tile, tile * tiles)
    assert np.array_equal(x, source)
    assert np.count_nonzero(whole != 7) == n


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 300), skew=st.integers(0, LINE - 1))
def test_zeros(n, skew):
    x, whole = within(n, skew)
    zeros(x)
    assert not x.any()
    assert np.count_nonzero(whole != 7) == n


@pytest.mark.parametrize("name", ["none", "onebit_group", "int8_group", "threelc", "dgc"])
def test_large_results_are_what_is_added(name):
    n = cpu_past.LEAST // 4 + 1337
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
    n = cpu_past.LEAST // codec.payload_bytes(1) + 1337
    x = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    meant = compll.compile(name, "reference").encode(x)
    for skew in (0, 1, 63):
        room = np.full(len(meant) + 3 * BESIDE, 7, np.uint8)
        begin = -room.ctypes.data % cpu_pour.LINE + skew
        codec.encode_batch(x, np.array([[0, n, 0, 0, 0]]), room, np.array([begin]))
        assert np.array_equal(room[begin : begin + len(meant)], meant)
        assert (room[:begin] == 7).all()
        assert (room[begin + len(meant) :] == 7).all()
