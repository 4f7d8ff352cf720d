"""Searched thresholds: the tree of thresholds that a walk counts for, and the tries one by one."""

import numpy as np
import pytest

from compll.numerics.numbers import MOST_TRIES, TRIES, Tries, walks_of_tries
from tests.compll.cuda_host.pieces import pieces_equal

#: numbers of `adjust` and `bisect`, as in the language, for different numbers of tries
GIVEN = {
    "adjust": [(2.0, 90, 110, 0.7, 1.3, tries) for tries in (0, 1, 3, 11, np.nan)],
    "bisect": [(0.0, 5.0, 99, 101, tries) for tries in (0, 1, 2, 7, 40, np.inf)],
}


def one_by_one(op, given, count):
    """The threshold and its count, by the language's definition."""
    tries = 0 if given[-1] != given[-1] else int(min(given[-1], 100))
    if op == "adjust":
        t, fewest, most, down, up = given[:-1]
        for _ in range(tries):
            if fewest <= count(t) <= most:
                break
            t *= down if count(t) < fewest else up
        return t, count(t)
    low, high, fewest, most = given[:-1]
    t = low + (high - low) / 2
    for _ in range(tries):
        t = low + (high - low) / 2
        if fewest <= count(t) <= most:
            break
        low, high = (low, t) if count(t) < fewest else (t, high)
    return t, count(t)


@pytest.mark.parametrize("op", GIVEN)
def test_a_tree_of_tries_is_the_tries_one_by_one(op):
    x = np.abs(np.random.default_rng(0).standard_normal(1000))
    count = lambda t: int(np.count_nonzero(x >= t))  # noqa: E731
    for given in GIVEN[op]:
        rule, done = Tries(op, given), 0
        state = rule.begin()
        while state[2] >= 0:
            counts = [count(t) for t in rule.tree(*state[:2])]
            assert len(counts) == TRIES
            found, reached, *state = rule.decide(state, counts)
            done += 1
        assert (found, reached) == one_by_one(op, given, count)
        assert done <= walks_of_tries(MOST_TRIES)


@pytest.mark.parametrize("tries", [0, 1, 2, 3, 11, MOST_TRIES, MOST_TRIES + 1])
def test_walks_of_a_search_that_finds_nothing(tries):
    rule, done = Tries("adjust", (2.0, 90, 110, 0.7, 1.3, tries)), 0
    state = rule.begin()
    while state[2] >= 0:
        _, _, *state = rule.decide(state, [0] * TRIES)
        done += 1
    assert done == walks_of_tries(min(tries, MOST_TRIES))


@pytest.mark.parametrize("tries", ["max(3, calls)", "max(calls, 3)", "max(2, int(sqrt(calls)))"])
def test_tries_that_depend_on_data(tries, tmp_path, rng):
    """The host took the first number of a maximum for the number of walks: CUDA made others."""
    text = f"""
name: own
encode:
  calls: count(g > 1)
  t: adjust(abs(g), 100, n * 0.01, n * 0.02, 0.9, 1.1, {tries})
  u: bisect(abs(g), 0, 1000, n * 0.01, n * 0.02, {tries})
payload: {{t: float32, u: float32}}
decode: t + u + 0 * n
"""
    pieces_equal(text, tmp_path, lambda n: rng.standard_normal(n), lengths=(3000, 700))
