"""The model of messages against steps worked out by hand."""

import random

import pytest

from bench.coordinator import BUCKETS, LATENCY, OWNER, Links, readiness, seconds


def test_a_bucket_of_two_ranks_by_hand():
    """A contribution each way, the owner's average, and a result each way."""
    links = Links(message=0.01, latency=0.001)
    there = 0.1 + 2 * (0.01 + 0.001) + OWNER
    assert seconds([[0.1], [0.1]], links, False) == pytest.approx(there)
    assert seconds([[0.1], [0.1]], links, True) == pytest.approx(there)
    asked = Links(message=0.01, latency=0.001, grant=0.002)
    assert seconds([[0.1], [0.1]], asked, True) == pytest.approx(there + 2 * 0.002)


def test_everybody_waits_for_the_slow_rank():
    links = Links(message=0.0, latency=LATENCY)
    assert seconds([[0.1], [0.3], [0.1]], links, False) == pytest.approx(0.3 + 2 * LATENCY + OWNER)


def test_a_link_carries_one_message_at_a_time():
    """Each of four ranks sends three messages and receives three, in both phases."""
    links = Links(message=0.01, latency=0.0)
    taken = seconds([[0.0]] * 4, links, False)
    assert taken == pytest.approx(6 * 0.01 + OWNER)


def test_one_rank_is_slower():
    found = readiness(4, 1.0, random.Random(1))
    last = sorted(times[-1] for times in found)
    assert [len(times) for times in found] == [BUCKETS] * 4
    assert last[3] > 1.7 * last[2]
