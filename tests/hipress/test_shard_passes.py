"""Backward passes of sharded models: held back, given up, in pipelines, and nested."""

from __future__ import annotations

import pytest

from tests.hipress import shard_passes_ranks as ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast


@pytest.mark.slow
def test_the_scale_of_a_gradscaler_changes_nothing():
    """Residuals of replicas once stayed in the scale of their step, and counted twice after it."""
    for found in launch(ranks.scaled, 2):
        assert {codec: scaled == plain for codec, (plain, scaled) in found.items()} == (
            dict.fromkeys(found, True)
        )


@pytest.mark.slow
@pytest.mark.parametrize("layers", first_fast([True, False]))
def test_gradients_held_back_are_those_of_their_parameters(layers):
    """Passes that use other branches once gave one branch's gradient to another."""
    for found in launch(ranks.held, 2, layers):
        assert {passes: error for passes, error in found.items() if error > 1e-5} == {}


@pytest.mark.slow
@pytest.mark.parametrize("of", ["replicas", "shards"])
def test_micro_batches_that_are_given_up_leave_nothing(of):
    """Their sums once entered the next step after `reset_iter_state`, or gradients set to zero."""
    for found, errors in launch(ranks.dropped, 2, of):
        assert found == {"forward": True, "backward": True}
        for message in errors.values():
            assert "wait for their average over replicas" in message


def test_a_state_that_is_loaded_drops_what_was_held_back():
    assert launch(ranks.loaded, 2) == [True, True]


def test_replicas_average_a_group_that_has_no_codec():
    first, second = launch(ranks.uncompressed, 2)
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("fused", first_fast([True, False]))
def test_forward_and_backward_passes_compute_with_the_same_weights(fused):
    """int8_group rounds at random, and once drew anew after each backward pass, also within a
    step, of which the report then told a part."""
    for found in launch(ranks.drawn, 2, fused):
        assert {way: each[:4] for way, each in found.items()} == (
            dict.fromkeys(found, (True, True, 0, 3))
        )
        bytes_of = {way: each[4] for way, each in found.items()}
        assert bytes_of["nested"] == bytes_of["once"]
        assert bytes_of["chunked"] > 2 * bytes_of["once"]


@pytest.mark.parametrize("frontend", ["shard", "group"])
def test_errors_of_a_device_are_raised_before_an_optimizer_steps(frontend):
    for counts, errors in launch(ranks.settled, 2, frontend):
        assert counts == [1, 2, 3]
        assert {error.kind for error in errors} == {"SyncError"}
        assert "a damaged payload" in errors[0].message


def test_weights_that_are_stepped_in_the_backward_pass():
    assert launch(ranks.stepped_in_backward, 2) == [(True, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["double", "reduced in float64", "mixed"])
def test_types_that_no_codec_takes_are_left_to_fsdp(kind):
    """float64 was once an error in the step, and adapters beside frozen 16-bit weights travelled as
    bytes, which the report took for a codec's."""
    for same, codecs, left in launch(ranks.other_types, 2, kind):
        assert left
        if kind == "mixed":  # the adapter's gradient is compressed
            assert codecs == {"all_gather": {None}, "reduce_scatter": {"int4_group"}}
        else:
            assert same
            assert codecs["reduce_scatter"] == {None}
