"""A plain module, synchronized without DDP, on real processes."""

from __future__ import annotations

import pytest
import torch

from hipress.engine.order import LARGE_BYTES
from tests.hipress import synchronizer_ranks as ranks
from tests.hipress.launch import launch
from tests.hipress.test_training import together
from tests.patience import HANG
from tests.tiers import first_fast

IN_PLACE = 64  # bytes from which the tests' gradients are not gathered
EVERYTHING = {"min_size": 0}  # in sums of three uncompressed ranks the place decides
CASES = {
    "gathered": (EVERYTHING, LARGE_BYTES, {}),
    "in place": ({"verify": True} | EVERYTHING, IN_PLACE, {}),
    "accumulated": (EVERYTHING, IN_PLACE, {"accumulate": 3}),
    "kept gradients": (EVERYTHING, IN_PLACE, {"set_to_none": False}),
    "checked": ({"checksum": True} | EVERYTHING, LARGE_BYTES, {}),
}


@pytest.mark.parametrize("name, world_size", first_fast([("int8", 2), ("sparse", 3)]))
def test_ten_steps_are_those_of_wrap_bit_for_bit(name, world_size):
    results = launch(ranks.beside_wrap, world_size, name, CASES)
    for title in CASES:
        own, theirs, losses, others = zip(*(result[title] for result in results), strict=True)
        assert together(own) == together(theirs), title
        assert losses == others, title


@pytest.mark.parametrize("scope", first_fast(["tensor", "model"]))
def test_uncompressed_steps_are_those_of_plain_ddp(scope):
    for _, far, steps in together([[each] for each in launch(ranks.beside_plain, 2, scope)]):
        assert far < 1e-6
        assert steps == 10


def test_scopes():
    """Compressing all gradients as one selects other values than compressing tensor by tensor."""
    results = launch(ranks.scopes, 2, "sparse")
    digests = {
        scope: together([result[scope][0] for result in results])
        for scope in ("tensor", "bucket", "model")
    }
    assert digests["tensor"] != digests["model"]
    for result in results:
        for _, first, last, jobs in result.values():
            assert last < first
            assert jobs == 1


def test_wrap_compresses_a_model_as_one():
    jobs, _, trains = together(launch(ranks.wrapped_as_one, 2, "sparse"))
    assert jobs == 4
    assert trains


@pytest.mark.parametrize("large", first_fast([LARGE_BYTES, IN_PLACE]))
def test_parameters_of_every_kind(large):
    """Tied, frozen, sparse, bfloat16, transposed, empty, float64; and broadcast from rank 0."""
    results = launch(ranks.odd, 2, "none", large)
    together([(start, end) for start, end, _, _ in results])
    for _, _, far, losses in results:
        assert far == []
        assert losses[-1] < losses[0]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_float32_gradients_of_bfloat16_parameters():
    """Averages were once rounded to bfloat16."""
    for rank, ((raised, far), (late, _)) in enumerate(launch(ranks.full_precision, 2)):
        assert raised.kind == "none"
        assert far < 1e-6
        assert late.kind == "SyncError"
        assert late.message.startswith(f"rank {rank}: the gradient of '")
        assert "set the parameter's grad_dtype before" in late.message


def test_ranks_whose_gradients_come_in_other_orders():
    _, steps, first = together(launch(ranks.own_order, 2))
    assert steps == 4
    assert first.startswith("three")  # as on rank 0


def test_collectives_of_the_user_in_a_backward_pass_are_apart():
    found = together(launch(ranks.meeting_within, 2))
    assert len(found) == 3


def test_a_second_gradient_in_a_step_is_refused():
    for rank, (second, step) in enumerate(launch(ranks.second_gradient, 2)):
        assert second.kind == step.kind == "SyncError"
        assert second.message.startswith(f"rank {rank}: a second gradient of 'last.")
        assert "sync.no_sync()" in second.message
        assert second.message in step.message


@pytest.mark.slow
def test_gradients_that_are_changed_before_they_are_averaged_are_told():
    """Some gradients had gone by then, others not: ranks agreed, but not on the mean gradient."""
    for rank, found in enumerate(launch(ranks.changed, 2)):
        assert found.pop("clipped within no_sync") == ("none", "")
        for title, (kind, message) in found.items():
            assert kind == "SyncError", title
            assert message.startswith(f"rank {rank}: the gradient of '"), title
            what = "changed" if title.startswith(("zeroed", "taken")) else "used"
            assert f"was {what} between its backward pass and sync.step()" in message


def test_gradients_are_shown_again_after_detach_and_after_a_failure():
    for found in launch(ranks.shown_again, 2):
        assert found == {"detach": True, "failure": True}


def test_bad_options_raise_one_error_on_every_rank():
    launch(ranks.refusals, 2)


def test_one_rank_that_wraps_is_told():
    found = launch(ranks.mixed_ways, 2)
    assert together(found) == (
        "ConfigMismatch",
        "ranks disagree on called: rank 0: hipress.Synchronizer, rank 1: hipress.wrap",
    )


def test_parameters_that_are_freed_later_are_told():
    results = launch(ranks.strangers, 2)
    together([trained for _, trained in results])
    for rank, ((kind, message), _) in enumerate(results):
        assert kind == "SyncError"
        assert message.startswith(f"rank {rank}: 'first.weight' was frozen")


@pytest.mark.parametrize("name", first_fast(["int8", "sparse"]))
def test_states_are_those_of_wrap(name):
    results = launch(ranks.states, 2, name)
    together([result[2:] for result in results])
    for equal, step, own, theirs, detached, reported in results:
        assert equal
        assert step == 3
        assert own == theirs
        assert "detached" in detached.message
        assert "not attached" in reported.message


@pytest.mark.slow
def test_an_optimizer_steps_as_averages_arrive():
    results = launch(ranks.stepped, 2, "int8")
    for title, (given, at_the_end, error) in together(results).items():
        assert given == at_the_end, title
        assert error.kind == "SyncError"
        assert "call no optimizer.step()" in error.message


def test_failures_are_raised_by_step():
    one, other = launch(ranks.failing, 2)
    for first, again, state in (one, other):
        assert first.kind in ("RankLost", "SyncError")
        assert "rank " in first.message
        assert "task `" in first.message
        assert first.seconds < HANG / 2
        assert again.kind == "SyncError"
        assert "step 2 failed" in again.message
        assert state.kind == "StateError"
    assert "ValueError: broken" in other[0].message


@pytest.mark.slow
def test_compiled_graphs_of_gradients_scaled_and_without_data():
    results = launch(ranks.more, 2)
    for title in results[0]:
        together([result[title][1] for result in results])
        assert all(result[title][0] for result in results), title


def test_a_single_rank_trains_as_without():
    ((plain, own, installed, tensor),) = launch(ranks.alone, 1)
    assert plain == own
    assert not installed
    assert tensor.tolist() == 5 * [1]


def test_a_sparse_gradient_that_nobody_foresaw_is_told():
    for kind, message in launch(ranks.unforeseen, 2):
        assert kind == "SyncError"
        assert "gradient of 'weight' is sparse, expected was a dense one" in message


def test_all_reduce_of_one_tensor():
    names = ("none", "int4_group", "dgc", "powersgd", "signum")
    results = launch(ranks.all_reduced, 2, names)
    together([{name: totals for name, (totals, _) in found.items()} for found, _ in results])
    for found, errors in results:
        assert max(found["none"][1]) < 0.01
        assert max(found["int4_group"][1]) < 0.3
        kinds = [2 * ["ConfigError"], 2 * ["ConfigMismatch", "ConfigError"]]
        assert [error.kind for error in errors] == [*kinds[0], *kinds[1]]
        assert "tensor of all_reduce: rank 0: shape [3], rank 1: shape [4]" in errors[2].message
        assert "2 ranks do not make nodes of 3" in errors[3].message
        assert "topology of all_reduce: rank 0: 1, rank 1: 2" in errors[4].message
        assert "has one direction" in errors[5].message


def test_an_all_reduce_that_one_rank_refuses_fails_on_all():
    """The other ranks once went on with the data of that rank's next all-reduce."""
    (other, *after), (refused, *same) = launch(ranks.refused_alone, 2)
    assert (other, refused) == ("RankLost", "ConfigError")
    assert after == same == [[0.5] * 3, True]


def test_all_reduce_with_another_codec_back_and_by_nodes():
    """Averages that come back uncompressed are more exact; by nodes only two ranks round."""
    found = together(launch(ranks.both_ways, 4))
    (_, two), (_, one), (_, nodes) = found
    assert one < 0.8 * two
    assert nodes < two
