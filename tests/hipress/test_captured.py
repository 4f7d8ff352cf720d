"""Buckets as CUDA graphs, on emulated devices: chosen by a trial, with the bits of single tasks."""

import pytest

from tests.hipress import capture_ranks
from tests.hipress.launch import launch

ONE_BY_ONE = "tasks are launched one by one: "
GRAPHS = "buckets are launched as CUDA graphs"


def agreed(*how):
    """Results of the first rank, by use of graphs; digests and plans are those of all ranks."""
    results = launch(capture_ranks.trained, 2, *how)
    for told in zip(*results, strict=True):
        assert len({str(each[:3]) for each in told}) == 1, told
    return results[0]


@pytest.mark.slow  # casync's test_capture.py compares bits
@pytest.mark.parametrize("name", ["onebit_group", "terngrad"])
def test_a_faster_graph_is_kept_with_the_bits_of_single_tasks(name):
    plain, auto, always = agreed(name, [False, "auto", True])
    assert plain[0] == auto[0] == always[0]
    assert plain[1:] == ([], ONE_BY_ONE + "capture=False", 0, 0, 0)
    assert [verdict for _, verdict in auto[1]] == ["slower", "kept"]
    assert auto[1][1][0].endswith(", captured")
    assert auto[2] == always[2] == GRAPHS
    assert always[4] > auto[4] > auto[3] > auto[5] > 0


@pytest.mark.slow
def test_slower_graphs_are_given_up():
    plain, auto = agreed("onebit_group", [False, "auto"], (0.1, 0.11), None, True)
    assert plain[0] == auto[0]
    assert [verdict for _, verdict in auto[1]] == ["kept", "slower"]
    assert auto[2] == ONE_BY_ONE + "as fast in a trial"
    assert auto[3] > 0
    assert auto[5] == 0


@pytest.mark.slow
def test_a_capture_that_fails_on_one_rank_leaves_all_as_they_were():
    """Captured on one rank only, buckets would hang in NCCL, so none is launched."""
    first, other = launch(capture_ranks.trained, 2, "onebit_group", ["auto"], (0.11, 0.1), 1)
    assert first[0][:3] == other[0][:3]
    assert [verdict for _, verdict in first[0][1]] == ["kept", "could not be captured"]
    assert first[0][2] == ONE_BY_ONE + "a capture failed"
    assert first[0][3] > 0
    assert first[0][4:] == (0, 0)


@pytest.mark.slow
def test_what_cannot_be_captured_is_told_and_not_tried():
    ((_, tried, told, *counts),) = agreed("threshold", ["auto"])
    assert (tried, told) == ([], ONE_BY_ONE + "the lengths of threshold vary")
    assert counts == [0, 0, 0]
