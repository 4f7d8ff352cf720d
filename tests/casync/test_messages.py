"""Layouts of messages: fixed and of varying length."""

import numpy as np
import pytest

from casync.building.parts import Part
from casync.errors import PayloadError
from casync.graph.layout import Layout
from tests.casync.fakes import CODECS


def layout(codec, lengths):
    rows = tuple((0, length, 0, 0, 0) for length in lengths)
    return Layout.of(Part(0, codec, "ps", 0, rows), CODECS[codec])


def test_fixed_payloads_lie_aligned_one_behind_the_other():
    made = layout("exact", [1, 3])
    assert (made.at.tolist(), made.bound.tolist(), made.size) == ([0, 8], [4, 12], 24)
    assert made.pack(np.zeros(made.size, np.uint8), np.array([4, 12]))[2] == 24


def test_only_used_bytes_travel():
    made = layout("sparse", [10, 10, 10])
    sender, receiver = np.zeros(made.size, np.uint8), np.zeros(made.size, np.uint8)
    used = np.array([16, 0, 8])
    for at, length, value in zip(made.at, used, (1, 2, 3), strict=True):
        sender[at : at + length] = value
    size = made.pack(sender, used)[2]
    assert size == 3 * 8 + 16 + 8
    made.clear(receiver)
    receiver[:size] = sender[:size]
    at, lengths, total = made.unpack(receiver, size)
    assert (lengths.tolist(), total) == (used.tolist(), size)
    assert [receiver[a : a + n].tolist() for a, n in zip(at, lengths, strict=True)] == [
        [1] * 16,
        [],
        [3] * 8,
    ]


@pytest.mark.parametrize("used", [[81, 0], [-1, 0], [0], [0, 0, 0]])
def test_lengths_that_do_not_fit_are_refused(used):
    made = layout("sparse", [10, 10])
    with pytest.raises(PayloadError, match="do not fit the bounds"):
        made.pack(np.zeros(made.size, np.uint8), np.array(used))


def test_short_messages_are_noticed():
    made = layout("sparse", [10])
    buffer = np.zeros(made.size, np.uint8)
    made.clear(buffer)
    with pytest.raises(PayloadError, match=r"used lengths \[-1\]"):
        made.unpack(buffer)
    made.pack(buffer, np.array([16]))
    with pytest.raises(PayloadError, match="message of 8 bytes, expected 24"):
        made.unpack(buffer, 8)
    with pytest.raises(PayloadError, match="message of 3 bytes, expected 8"):
        layout("exact", [2]).unpack(buffer, 3)


def test_a_raw_payload_is_as_long_as_its_floats():
    assert layout("raw", [7]).bound.tolist() == [28]
