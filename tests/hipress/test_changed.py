"""Models that change after hipress took them: carried along, or refused on every rank by name."""

from __future__ import annotations

import pytest

from tests.hipress import changed_ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast


@pytest.mark.parametrize(
    "name, way, at",
    first_fast(
        [("topk", "wrap", 0), ("onebit_group", "wrap", 0), ("topk", "wrap", 5), ("topk", "sync", 5)]
    ),
)
def test_states_follow_a_memory_format(name, way, at):
    for lost in launch(changed_ranks.channels_last, 2, name, way, at):
        assert lost < 1e-5


@pytest.mark.slow
def test_another_memory_format_on_one_rank_is_told():
    for kind, message, _ in launch(changed_ranks.differently, 2):
        assert kind == "ConfigMismatch"
        assert "memory formats of parameters" in message
        assert "rank 1: weight 40x6x3x3" in message


@pytest.mark.parametrize("way", first_fast(["wrap", "unused", "sync", "gossip"]))
def test_changes_that_lose_states_are_refused(way):
    changes = changed_ranks.CHANGES
    if way == "wrap":  # DDP itself misses a part of the gradients
        changes = tuple(each for each in changes if each is not changed_ranks.last_there_and_back)
    harmless = {each.__name__ for each in changed_ranks.HARMLESS[way]}
    for rank, found in enumerate(launch(changed_ranks.changed, 2, way, changes)):
        for change, (kind, message) in found.items():
            if change in harmless:
                assert kind == "none", (change, message)
            else:
                assert kind == "SyncError", (change, kind, message)
                assert f"rank {rank}: " in message
                assert "when hipress took the model" in message or "maybe back" in message


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrap", "unused", "sync"])
def test_a_change_on_one_rank_is_told_to_all(way):
    changes = (changed_ranks.assign,)  # one: DDP's own collectives are out of step then
    theirs, own = launch(changed_ranks.changed, 2, way, changes, 1)
    for change in own:
        assert own[change][0] == "SyncError"
        assert own[change][1].startswith("rank 1: ")
        kind, message = theirs[change]
        assert kind in ("SyncError", "RankLost"), message
        assert "rank 1 failed" in message
        assert "SyncError: rank 1: " in message


@pytest.mark.slow
def test_a_part_of_which_ddp_misses_the_gradients_is_named():
    for rank, (step, message, notes) in enumerate(launch(changed_ranks.partly, 2)):
        assert step == 3
        assert "find_unused_parameters=True" in message
        assert notes[0].startswith(f"rank {rank}: '2.weight' was converted or moved")


@pytest.mark.parametrize("way", first_fast(["sync", "gossip", "wrap"]))
def test_parameters_are_known_by_identity(way):
    for names in launch(changed_ranks.taken, 2, way):
        assert names == [["0.weight", "0.bias", "2.weight", "2.bias"]] * 3
