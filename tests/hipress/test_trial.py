"""The choice of a plan, and later trials: from recorded times, without a clock."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from hipress.choose.trial import COUNTED, SETTLING, TURNS, WINDOW, Trial, Watch, results

TURN = SETTLING + COUNTED


def run(trial: Trial, seconds) -> list[int]:
    """The plan of each step, if a step by plan p takes seconds(p)."""
    taken = []
    while not trial.over:
        taken.append(trial.current)
        trial.observe(seconds(trial.current))
    return taken


def test_plans_take_turns_and_ten_steps_of_each_count():
    trial = Trial(3, kept=2)
    taken = run(trial, [0.10, 0.11, 0.12].__getitem__)
    assert taken == [plan for _ in range(TURNS) for plan in range(3) for _ in range(TURN)]
    assert [len(times) for times in trial.times] == [10, 10, 10]
    assert trial.current == 0
    assert trial.spent == pytest.approx(TURN * TURNS * 0.33)


def test_a_plan_that_cannot_run_is_dropped_at_once():
    trial = Trial(3, kept=2)
    taken = run(trial, [0.11, math.inf, 0.12].__getitem__)
    assert taken.count(1) == 1
    assert (trial.current, trial.refused) == (0, {1})
    rows = results(trial, "abc", [0.0] * 3)
    assert [row.verdict for row in rows] == ["kept", "could not be captured", "slower"]
    assert trial.cost == pytest.approx(TURN * TURNS * 0.01)


def test_steps_in_which_buffers_are_made_do_not_count():
    trial = Trial(2, kept=1)
    before: list[int] = []

    def seconds(plan):
        fresh = before[-1:] != [plan]
        before.append(plan)
        return 5.0 if fresh and plan == 0 else 0.1 + 0.05 * plan

    run(trial, seconds)
    assert trial.median(0) == 0.1
    assert trial.current == 0


def test_a_clearly_slower_candidate_is_dropped_after_two_counted_steps():
    """In 100 steps, a plan that was wrongly predicted to be fast costs little."""
    trial = Trial(3, kept=2)
    taken = Counter(run(trial, [0.1, 0.9, 0.12].__getitem__))
    assert taken == {0: 2 * TURN, 1: SETTLING + 2, 2: 2 * TURN}
    assert trial.current == 0


def test_the_trial_ends_when_all_others_are_out():
    trial = Trial(3, kept=2)
    assert run(trial, [0.1, 0.9, 0.9].__getitem__) == [0] * TURN + [1] * 4 + [2] * 4
    assert trial.current == 0


def test_the_first_plan_is_out_in_its_second_turn_at_the_latest():
    trial = Trial(2, kept=1)
    assert run(trial, [0.9, 0.1].__getitem__) == [0] * TURN + [1] * TURN
    assert trial.current == 1


def test_a_gain_below_the_spread_is_no_reason_to_switch():
    noise = random.Random(1)

    def times(plan):
        return 0.1 + 0.01 * plan * -1 + noise.uniform(-0.05, 0.05)

    trial = Trial(2, kept=0)
    run(trial, times)
    assert trial.current == 0
    steady = Trial(2, kept=0)
    run(steady, [0.100, 0.099].__getitem__)
    assert steady.current == 1


def test_one_slow_step_does_not_decide():
    """A validation between two steps, for example."""
    trial, steps = Trial(2, kept=1), iter(range(1000))
    run(trial, lambda plan: 9.0 if next(steps) % 7 == 4 else [0.1, 0.12][plan])
    assert trial.current == 0


def test_one_plan_needs_no_trial():
    trial = Trial(1, kept=0)
    assert trial.over
    assert trial.current == 0


def test_results_say_what_was_predicted_and_measured():
    trial = Trial(3, kept=2)
    found = results(trial, ["a", "b", "c"], [1.0, 2.0, 3.0])
    assert [each.verdict for each in found] == ["being tried"] * 3
    assert [each.step_seconds for each in found] == [None] * 3
    run(trial, [0.1, 0.9, 0.12].__getitem__)
    found = results(trial, ["a", "b", "c"], [1.0, 2.0, 3.0])
    assert [each.verdict for each in found] == ["kept", "slower", "slower"]
    assert [(each.plan, each.predicted_seconds) for each in found] == [
        ("a", 1.0), ("b", 2.0), ("c", 3.0),
    ]  # fmt: skip
    assert [each.step_seconds for each in found] == [0.1, 0.9, 0.12]
    assert [each.steps for each in found] == [10, 2, 10]


def test_a_faster_one_within_the_spread_is_told_as_that():
    trial, steps = Trial(2, kept=1), iter(range(1000))
    run(trial, lambda plan: 0.1 + 0.001 * plan + 0.01 * (next(steps) % 3))
    assert [each.verdict for each in results(trial, "ab", [1, 2])] == [
        "faster by less than the spread", "kept",
    ]  # fmt: skip


def test_drift_of_a_quarter_for_two_windows():
    watch = Watch(step=0.1)
    assert 2 * WINDOW == 50
    assert not any(watch.drifted(step, 0.01) for step in (0.1, 0.13, 0.12, 0.13, 0.1, 0.07))
    assert watch.drifted(0.07, 0.01)  # faster: another plan may be better now


def test_drift_of_the_link_alone():
    watch = Watch(step=0.1)
    assert not watch.drifted(0.1, 0.020)
    assert not watch.drifted(0.1, 0.002)
    assert watch.drifted(0.1, 0.002)
    quick = Watch(step=0.1)
    assert not any(quick.drifted(0.1, message) for message in (2e-4, 9e-4, 9e-4, 1e-3))


def test_patience_grows_with_looks_in_vain():
    watch = Watch(step=0.1, patience=4)
    assert [watch.drifted(0.2, 0.01) for _ in range(4)] == [False, False, False, True]
