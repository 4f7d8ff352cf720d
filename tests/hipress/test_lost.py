"""Ranks that are killed or interrupted in `wrap`: the others say so, long before the time-out."""

from __future__ import annotations

import pytest

from tests.hipress import lost_ranks
from tests.hipress.launch import DIED, launch
from tests.patience import HANG
from tests.tiers import first_fast


@pytest.mark.parametrize("place", lost_ranks.PLACES)
def test_a_rank_that_is_killed_in_wrap(place):
    *waiting, dead = launch(lost_ranks.killed, 3, place, may_die=[2])
    assert dead == DIED
    for rank, (kind, message, seconds) in enumerate(waiting):
        assert kind == "RankLost"
        assert message == f"rank {rank} stops, because rank 2 ended"
        assert seconds < HANG / 4


@pytest.mark.parametrize("place, kind", first_fast([("step", "RankLost"), ("wrap", "RankLost")]))
def test_rank_0_that_keeps_the_store_is_killed(place, kind):
    dead, *waiting = launch(lost_ranks.keeper_killed, 3, place, may_die=[0])
    assert dead == DIED
    for found, message, seconds in waiting:
        assert found == kind
        assert "rank 0 ended" in message.split("\n")[0]
        assert seconds < HANG / 4


@pytest.mark.slow
def test_rank_0_that_keeps_the_store_is_stopped():
    """A rank that ended because the store is silent says so; its end is not the reason."""
    *_, (kind, message, _) = launch(lost_ranks.keeper_stopped, 3, may_die=[0, 1])
    assert kind == "AgreementTimeout"
    assert message.startswith("rank 2 stops, because rank 1 waited")
    assert "its process (in a job often rank 0) has ended, is stopped" in message


def test_a_rank_that_is_interrupted_in_wrap():
    *waiting, interrupted = launch(lost_ranks.interrupted, 3)
    for place in lost_ranks.PLACES:
        assert interrupted[place] == "interrupted"
        for rank, found in enumerate(waiting):
            kind, message, seconds = found[place]
            assert kind == "RankLost"
            assert message == (
                f"rank {rank} stops, because rank 2 was interrupted by a KeyboardInterrupt"
            )
            assert seconds < HANG / 4
    assert all(found["at last"] == 2 for found in (*waiting, interrupted))


def test_a_rank_that_is_interrupted_while_it_waits():
    first, *others = launch(lost_ranks.interrupted_while_it_waits, 3)
    assert first == "interrupted"
    for rank, (kind, message, seconds) in enumerate(others, 1):
        assert kind == "RankLost"
        assert f"rank {rank} stops, because rank 0 was interrupted" in message
        assert seconds < HANG / 4
