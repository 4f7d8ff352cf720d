"""Positions as bits: both backends write the same stream, and refuse a damaged one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compll.ir.storage import STORAGES, rice_parameter
from tests.compll import oracles
from tests.compll.routines import PRINTERS, stream


def most_bytes(count, n):
    return STORAGES["golomb"].most_bytes(count, n, 1)


sets = st.integers(1, 5000).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=200))
)
dense = st.integers(1, 600).flatmap(
    lambda n: st.tuples(
        st.just(n), st.sets(st.integers(0, n - 1), min_size=min(n, 9) and n * 9 // 16)
    )
)


@pytest.mark.parametrize("printer", PRINTERS)
@given(sets | dense)
def test_round_trip_within_the_bound(printer, drawn):
    n, chosen = drawn
    positions = np.array(sorted(chosen), np.int64)
    data = oracles.encode_golomb(positions, n)
    assert len(data) <= most_bytes(len(positions), n)
    assert oracles.decode_golomb(data, len(positions), n).tolist() == positions.tolist()
    out = np.full(len(data) + 9, 7, np.uint8)
    end = stream("golomb", printer).store(positions, n, out[4:])
    assert out[4 : 4 + end].tolist() == data.tolist()
    assert (out[:4] == 7).all()
    assert (out[4 + end :] == 7).all()
    assert stream("golomb", printer).load(data, len(positions), n) == positions.tolist()


@pytest.mark.parametrize("printer", PRINTERS)
@given(sets | dense)
def test_gaps(printer, drawn):
    n, chosen = drawn
    positions = np.array(sorted(chosen), np.int64)
    data, out = oracles.encode_gaps(positions), np.zeros(2 * len(positions) + 32, np.uint8)
    assert len(data) <= STORAGES["gaps"].most_bytes(len(positions), n, 1)
    assert oracles.decode_gaps(data, len(positions)).tolist() == positions.tolist()
    assert out[: stream("gaps", printer).store(positions, n, out)].tolist() == data.tolist()
    assert stream("gaps", printer).load(data, len(positions), n) == positions.tolist()


@pytest.mark.parametrize("printer", PRINTERS)
@given(st.binary(max_size=40), st.integers(0, 40), st.integers(1, 1 << 31))
def test_arbitrary_bytes_of_gaps(printer, raw, count, n):
    data = np.frombuffer(raw, np.uint8)
    positions = oracles.decode_gaps(data, count)
    good = positions is not None and (count == 0 or int(positions.max()) < n)
    assert stream("gaps", printer).load(data, count, n) == (positions.tolist() if good else None)


@pytest.mark.parametrize("printer", PRINTERS)
@given(st.binary(max_size=40), st.integers(0, 40), st.integers(1, 300), st.integers(0, 1))
def test_arbitrary_bytes(printer, raw, count, n, other):
    head = bytes([rice_parameter(count, n) + other])
    data = np.frombuffer(head + raw if count % 7 else raw, np.uint8)
    positions = oracles.decode_golomb(data, count, n)
    assert positions is None or not other or not count % 7
    good = positions is not None and (count == 0 or int(positions.max()) < n)
    assert stream("golomb", printer).load(data, count, n) == (positions.tolist() if good else None)


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_the_bound_grows_with_the_number_of_positions(count, n):
    count = min(count, n)
    assert all(most_bytes(c, n) <= most_bytes(count, n) for c in (count // 2, count // 3))


def test_the_bits_of_a_position():
    rng = np.random.default_rng(0)
    for share, least, most in ((0.01, 7.9, 8.3), (0.5, 1.9, 2.1), (0.9, 1.1, 1.12)):
        positions = np.flatnonzero(rng.random(50_000) < share)
        bits = 8 * len(oracles.encode_golomb(positions, 50_000)) / len(positions)
        assert least < bits < most
