"""Process groups that are made anew, and ranks that end between two steps or trainings."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from hipress.errors import ConfigMismatch
from hipress.ranks.coordinator import Coordinator
from tests.hipress import epoch_ranks
from tests.hipress.launch import DIED, launch
from tests.patience import HANG
from tests.tiers import first_fast


@pytest.mark.parametrize("way", first_fast(epoch_ranks.WAYS))
def test_survivors_and_a_newcomer_train_on(way):
    """They once heard why the old group had ended, and ended, too."""
    first, dead, *others = launch(epoch_ranks.regroup, 4, way, may_die=[1])
    assert dead == DIED
    for kind, message, parameters in (first, *others):
        assert kind == "none", message
        assert parameters == first[2] or way == "Gossip"


@pytest.mark.parametrize("way", first_fast(["Synchronizer", "wrap", "Gossip", "all_reduce"]))
def test_a_rank_that_ended_before_another_training(way):
    """The others once waited for it until the time-out."""
    (kind, message, seconds), dead = launch(epoch_ranks.ended_between, 2, way, may_die=[1])
    assert dead == DIED
    assert kind == "RankLost"
    assert "rank 1 ended" in message.split("\n")[0]
    assert seconds < HANG / 4


def test_a_rank_that_ends_before_the_first_step_of_auto():
    """An IndexError once hid its name; the step was "step -1"."""
    *waiting, dead = launch(epoch_ranks.ended_before_a_step, 3, may_die=[2])
    assert dead == DIED
    for kind, message, _ in waiting:
        assert kind == "RankLost"
        assert "rank 2 ended" in message.split("\n")[0]
        assert "-1" not in message


def test_an_epoch_has_its_own_notes(tmp_path):
    """Ranks that come again to a store, by a new process group, hear nothing of an earlier one."""
    store, again = (dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2))
    ranks = [Coordinator.on(store, rank, (0, 1), "all", HANG) for rank in (0, 1)]
    ranks[0].fail(ValueError("old"))
    with pytest.raises(ConfigMismatch, match="rank 0 failed: ValueError: old"):
        ranks[1].require_equal({})
    first = ranks[0].mailbox.epoch.number
    ranks = [Coordinator.on(again, rank, (0, 1), "all", 0.1) for rank in (0, 1)]
    assert ranks[0].mailbox.epoch.number == ranks[1].mailbox.epoch.number != first
    assert ranks[1].reason() is None
    ranks[0].tell("a step")
    assert ranks[1].silent("a step", time.monotonic()) == []
