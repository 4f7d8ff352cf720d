"""Policies and "auto" on devices, which are emulated; several ranks over gloo."""

import pytest

from tests.hipress import device_plan_ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast


@pytest.mark.parametrize("name", first_fast(["Accordion", "GraVAC", "Warmup"]))
def test_a_policy_on_a_device_does_as_on_the_host(name):
    """Bit for bit. Moments are waited for once in a window, never in a step between."""
    (labels, waits), (others, _) = launch(device_plan_ranks.by_policy, 2, name)
    assert labels == others
    assert len({tuple(each) for each in labels}) > 1, labels
    window = device_plan_ranks.POLICIES[name].judge([], 2).window if name != "GraVAC" else 4
    assert waits == ([] if name == "Warmup" else list(range(window, 14, window)))


def test_a_trial_on_a_device():
    (averages, tried, off, waits, costs), other = launch(device_plan_ranks.by_trial, 2)
    assert averages == other[0]
    assert tried == other[1]
    assert off < 1e-4
    assert [verdict for _, verdict, _ in tried].count("kept") == 1
    assert all(steps == 6 for _, _, steps in tried)
    places = [" on the host (" in plan for plan, _, _ in tried]
    assert places.count(True) > 0 < places[:-1].count(False)
    assert tried[-1][0] == "no compression"
    assert waits == [0]  # none after the trial
    assert costs == other[4]
    assert all(cost.encode(1e6) > 0 for cost in costs.codecs.values())
    assert costs.copies is not None
    assert costs.copies.leave(1e6) > 0
