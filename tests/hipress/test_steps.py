"""Beginning and end of steps, and the traces that failed ones leave."""

from __future__ import annotations

import pytest
from torch._C._profiler import _ExperimentalConfig

from tests.hipress import step_ranks
from tests.hipress.launch import DIED, launch
from tests.patience import HANG


@pytest.mark.slow
@pytest.mark.parametrize("what", ["reentrant", "apart", "one rank"])
def test_a_step_may_have_several_backward_passes(what):
    """Each was once counted as a step, so ranks' shared draws were those of different steps."""
    first, second = launch(step_ranks.passes, 2, what, "randomk")
    assert first == second
    assert first[:2] == (4, 4)


def test_detach_leaves_no_connections():
    """A cycle once kept them, and forked children hung or crashed when they collected it."""
    assert launch(step_ranks.restore, 2) == 2 * [[True, True, True]]


@pytest.mark.parametrize("static", [False, True])
def test_the_first_step_tells_what_went_wrong(static):
    (kind, message, seconds), dead = launch(
        step_ranks.died_in_the_first_step, 2, static, may_die=[1]
    )
    assert dead == DIED
    assert kind == "RankLost"
    assert message.startswith(
        "rank 1 ended during step 0\nrank 1 closed the connection in step 0 (rank 0, peer 1, task `"
    )
    assert seconds < HANG / 2


def test_an_interrupted_step_leaves_no_state():
    """It once had residuals of the step whose average DDP had lost."""
    (unfinished, state), other = launch(step_ranks.interrupted, 2)
    assert unfinished == "step 0 failed: rank 0: interrupted by a KeyboardInterrupt"
    assert state[0] == "StateError"
    assert unfinished in state[1]
    assert other[0] == "RankLost"


def test_a_step_that_raises_after_its_last_bucket_leaves_no_state():
    for (kind, _, _), state in launch(step_ranks.raised_after_the_last_bucket, 2):
        assert kind == "ZeroDivisionError"
        assert state[0] == "StateError"


def test_detach_in_a_step_is_refused():
    for rank, (kind, message, _) in enumerate(launch(step_ranks.detached_in_a_hook, 2)):
        assert kind == "StateError"
        assert message.startswith(f"rank {rank}: hipress.detach in a backward pass")


def test_a_rank_that_cannot_begin_tells_the_others():
    (theirs, _), (own, state) = launch(step_ranks.no_room, 2)
    assert own[:2] == (
        "SyncError",
        "rank 1, step 0: the bucket could not be handed over: MemoryError: no room",
    )
    assert theirs[0] == "RankLost"
    assert max(own[2], theirs[2]) < HANG / 2
    assert state[0] == "StateError"
    assert "step 0 failed" in state[1]


def test_a_model_is_wrapped_anew_after_a_failed_step():
    """No rank stays waiting in an all-reduce of DDP's own group."""
    (theirs, one), (own, other) = launch(step_ranks.wrapped_anew, 2)
    assert own[0] == "SyncError"
    assert theirs[0] == "RankLost"
    assert one == other


def test_errors_name_the_ranks_of_the_job():
    _, (kind, message, _), dead = launch(step_ranks.of_a_group, 3, may_die=[2])
    assert dead == DIED
    assert kind == "RankLost"
    told = "rank 2 ended during step 0\n" + (
        "rank 1 (global 2) closed the connection in step 0 (rank 0 (global 1), peer 1 (global 2), "
    )
    assert message.startswith(told)


@pytest.mark.slow
def test_advice_on_unused_parameters_is_that_of_wrap():
    for wrapped, automatic, attached, frozen in launch(step_ranks.unused, 2):
        for message, text in wrapped, automatic:
            assert "Expected to have finished reduction" in message
            assert 'hipress.wrap(model, ..., ddp_kwargs={"find_unused_parameters": True})' in text
        assert "hipress.wrap" not in attached[1]
        assert "'first.weight' was frozen after hipress took the model" in frozen[1]
        assert "hipress.wrap its .module anew" in frozen[1]


@pytest.mark.slow
def test_forward_hooks_of_wrap_are_not_compiled():
    ((ours, plain),) = launch(step_ranks.compiled, 1)
    assert ours == plain
    assert plain[0] > 0


@pytest.mark.slow
def test_a_profile_shows_buckets():
    """Events last from the backward pass's thread until all averages are complete, as for DDP."""
    for counts, last, over in launch(step_ranks.profiled, 2, {}):
        assert set(counts) >= {"hipress:bucket 0", "hipress:bucket 1"}
        assert set(counts.values()) == {2}
        assert all(name.startswith("hipress:bucket ") for name in counts)
        assert last
        assert over


@pytest.mark.slow
def test_a_profile_of_all_threads_shows_tasks():
    config = {"experimental_config": _ExperimentalConfig(profile_all_threads=True)}
    for counts, last, _ in launch(step_ranks.profiled, 2, config):
        tasks = {name for name in counts if not name.startswith("hipress:bucket ")}
        verbs = {"encode", "send", "recv", "decode", "merge"}
        assert tasks >= {f"hipress:{verb} int8_fake" for verb in verbs}
        assert last
