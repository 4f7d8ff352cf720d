"""Positions as bits: both backends write the same stream, and refuse a damaged one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compll.backends.reference import bitstreams
from compll.ir.storage import STORAGES
from tests.compll.routines import stream

WRITE = {"golomb": bitstreams.encode_golomb, "elias": bitstreams.encode_elias}
READ = {"golomb": bitstreams.decode_golomb, "elias": bitstreams.decode_elias}


def most_bytes(code, count, n):
    return STORAGES[code].most_bytes(count, n, 1)


sets = st.integers(1, 5000).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=200))
)


@pytest.mark.parametrize("code", WRITE)
@given(sets)
def test_round_trip_within_the_bound(code, drawn):
    n, chosen = drawn
    positions = np.array(sorted(chosen), np.int64)
    data = WRITE[code](positions, n)
    assert len(data) <= most_bytes(code, len(positions), n)
    assert READ[code](data, len(positions)).tolist() == positions.tolist()
    out = np.full(len(data) + 9, 7, np.uint8)
    end = stream(code).store(positions, n, out[4:])
    assert out[4 : 4 + end].tolist() == data.tolist()
    assert (out[:4] == 7).all()
    assert (out[4 + end :] == 7).all()
    assert stream(code).load(data, len(positions), n) == positions.tolist()


@pytest.mark.parametrize("code", WRITE)
@given(st.binary(max_size=40), st.integers(0, 40), st.integers(1, 300))
def test_arbitrary_bytes(code, raw, count, n):
    data = np.frombuffer(raw, np.uint8)
    positions = READ[code](data, count)
    good = positions is not None and (count == 0 or int(positions.max()) < n)
    assert stream(code).load(data, count, n) == (positions.tolist() if good else None)


@pytest.mark.parametrize("code", WRITE)
@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_the_bound_grows_with_the_number_of_positions(code, count, n):
    count = min(count, n)
    assert all(
        most_bytes(code, c, n) <= most_bytes(code, count, n) for c in (count // 2, count // 3)
    )


def test_about_ten_bits_for_one_in_a_hundred():
    rng = np.random.default_rng(0)
    positions = np.flatnonzero(rng.random(100_000) < 0.01)
    for code, least, most in (("golomb", 7.9, 8.3), ("elias", 9, 11)):
        bits = 8 * len(WRITE[code](positions, 100_000)) / len(positions)
        assert least < bits < most
