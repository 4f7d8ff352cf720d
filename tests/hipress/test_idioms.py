"""Common changes to gradients and models around a step work as with plain DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hipress.model.params import describe
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
    assert kind in ("SyncError", "RankLost", "AgreementTimeout"), told
    assert "rank 1" in told


@pytest.mark.parametrize("name, most", first_fast([("none", 1e-6), ("int8_group", 0.02)]))
def test_gradients_may_lie_in_one_memory(name, most):
    for found in launch(idiom_ranks.given, 2, name):
        assert {title: far for title, far in found.items() if far > most} == {}


@pytest.mark.parametrize("size", first_fast([64, 300_000]))
def test_gradients_may_be_conjugate_or_negative_views(size):
    for kinds, far in launch(idiom_ranks.mirrored, 2, size):
        assert kinds == (True, True)
        assert far < 1e-5


@pytest.mark.parametrize("large", first_fast([False, True]))
def test_a_hook_that_changes_gradients_later_on_is_told(large):
    for rank, (kind, message) in enumerate(launch(idiom_ranks.clamped_late, 2, large)):
        assert kind == "SyncError"
        assert message.startswith(f"rank {rank}: the gradient of '0.weight' was used")


def test_steps_may_end_in_inference_mode():
    for ours, right in launch(idiom_ranks.in_inference_mode, 2):
        assert all(map(torch.equal, ours, right))


def test_threads_have_groups_of_their_own():
    """Meetings of groups of the same ranks were once told apart by their order only."""
    for found in launch(idiom_ranks.in_threads, 2):
        assert len(found) == 6
        assert {who: far for who, far in found.items() if far > 1e-6} == {}


def test_buffers_that_cannot_be_sent_are_named():
    for found, mask in launch(idiom_ranks.buffers, 2):
        for (title, way), (kind, message) in found.items():
            if title == "conjugate" or (title, way) == ("int16", "Synchronizer"):
                assert kind == "none", (title, way, message)
            else:
                assert kind == "ConfigError", (title, way, message)
                assert message.startswith(f"'mask' is {title}")
                assert "keep it out of the model's parameters and buffers" in message
        assert mask.equal(idiom_ranks.BUFFERS["conjugate"]())


def test_patterns_of_tied_and_bracketed_names():
    model = nn.ModuleDict({"x[0]": nn.Linear(5, 50), "emb": nn.Embedding(50, 16)})
    model["head"] = nn.Linear(16, 50, bias=False)
    model["head"].weight = model["emb"].weight
    names = {param.name: param for param in describe(model)}
    for pattern, matched in {
        "head.weight": ["emb.weight"],
        "head.* 50x16": ["emb.weight"],
        "x[0].weight": ["x[0].weight"],
        "x[0].*": ["x[0].weight", "x[0].bias"],
        "x[[]0].bias": ["x[0].bias"],
        "[a-f]*": ["emb.weight"],
        "y[0].*": [],
    }.items():
        assert [name for name, param in names.items() if param.matches(pattern)] == matched
