"""Averages with `feedback: difference`, on real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.hipress import differences_ranks
from tests.hipress.launch import launch

WAYS = ["wrap", pytest.param("synchronizer", marks=pytest.mark.slow)]


def ef21(gradients, references):
    """The mean of references (float64 [n] for each rank, in place) after a step: EF21 with the
    largest hundredth of the elements, by its paper."""
    for gradient, reference in zip(gradients, references, strict=True):
        change = gradient - reference
        kept = np.argsort(-np.abs(change), kind="stable")[: max(1, len(change) // 100)]
        reference[kept] += change[kept]
    return np.mean(references, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_averages_are_those_of_the_paper(way):
    ranks = launch(differences_ranks.averages, 3, way, "ef21")
    assert len({digest for _, _, digest in ranks}) == 1
    given, found, _ = ranks[0]
    for index, parameter in enumerate(found[0]):
        references = np.zeros((3, parameter.numel()))
        for every, averaged in zip(given, found, strict=True):
            gradients = [each[index].flatten().double().numpy() for each in every]
            wanted = np.mean(gradients, axis=0)
            if parameter.numel() >= 100:
                wanted = ef21(gradients, references)
            assert averaged[index].flatten().numpy() == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize("codec", ["ef21", "diana"])
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_hold_the_mean_of_all_references(way, codec):
    ranks = launch(differences_ranks.states, 2, way, codec)
    assert "second.weight" in ranks[0]
    for name, held in ranks[0].items():
        means = [each[name]["mean"] for each in ranks]
        assert torch.equal(*means)
        assert means[0].any()
        total = sum(each[name]["reference"].double() for each in ranks)  # each of a share of 1 / 2
        assert torch.allclose(held["mean"].double(), total, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_means_that_differ_are_refused(way):
    for kind, message in launch(differences_ranks.parted, 2, way):
        assert kind == "ConfigMismatch"
        assert "the means of references to load" in message


def test_references_start_anew_after_a_gradient_that_is_not_finite():
    ranks = launch(differences_ranks.infinite, 2, "wrap")
    for after, anew in ranks:
        assert after.isfinite().all()
        assert torch.equal(after, anew)


def test_other_strategies_and_types_are_refused():
    (found, why), _ = launch(differences_ranks.refused, 2)
    for name, error in found.items():
        assert error.kind == "ConfigError", name
        assert "sends differences from references" in error.message
        assert "use strategy 'exchange'" in error.message
    assert "references of ef21 follow float32 gradients only" in why
