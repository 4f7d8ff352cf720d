"""Reactions of a training whose links changed, by its steps."""

import pytest

from bench import throttle
from bench.throttle import Change, Step


def steps(count, seconds=0.1, loss=5.0, plan="a", *, trying=False):
    return [Step(seconds, loss, trying, plan)] * count


def test_changes_are_told_in_steps_from_each():
    found = throttle.changes(
        [
            *steps(30, trying=True), *steps(70),
            *steps(40, 0.9), *steps(20, 0.5, trying=True), *steps(40, 0.4, plan="b"),
            *steps(100, 0.2, plan="b"),
        ],
        {100: "100mbit", 200: "1gbit"},
    )  # fmt: skip
    assert found == [
        Change("100mbit", 40, 60, "b", 0.1, 0.4),
        Change("1gbit", None, None, "b", 0.4, 0.2),
    ]
    assert "| 100mbit | 40 steps | 60 steps | b | 100 | 400 |" in throttle.text(found, 0.01)
    assert "never" in throttle.text(found, 0.01)
    assert "MISSED" in throttle.text(found, 0.01)


def test_losses_are_compared_by_tens_of_steps():
    one = [*steps(10, loss=5.0), *steps(10, loss=4.0)]
    other = [*steps(10, loss=5.1), *steps(5, loss=3.9), *steps(5, loss=4.1)]
    assert throttle.apart(one, other) == pytest.approx(0.1 / 5.1)
