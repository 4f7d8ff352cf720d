"""What scripts do to gradients and models around a step works as with plain DDP."""

from __future__ import annotations

import pytest

from tests.hipress import idiom_ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast


@pytest.mark.parametrize("name, most", first_fast([("int8_group", 0.02), ("none", 1e-6)]))
def test_gradients_may_get_other_memory(name, most):
    for found in launch(idiom_ranks.far, 2, name):
        assert {title: far for title, far in found.items() if far > most} == {}


@pytest.mark.parametrize("name, most", first_fast([("int8_group", 0.02), ("none", 1e-6)]))
def test_two_wrapped_models_share_a_trunk(name, most):
    (ours, right), (others, _) = launch(idiom_ranks.trunk, 2, name)
    assert (ours - right).abs().max() < most
    assert ours.equal(others)


def test_a_gradient_in_other_memory_is_refused_with_bucket_views():
    (kind, told, _), (own_kind, own, _) = launch(idiom_ranks.refused, 2)
    assert own_kind == "SyncError"
    assert "rank 1: the gradient of '2.bias' lies in other memory" in own
    assert kind in ("SyncError", "TransportError", "PeerTimeout"), told
    assert "rank 1" in told
