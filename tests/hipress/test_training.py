"""Training on real processes: results against plain DistributedDataParallel."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

import hipress
from tests.hipress import common, training_ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast

CASES = {
    "one bucket": ({}, {}, {}),
    "rebuilt buckets": ({}, common.SMALL_BUCKETS, {}),
    "accumulation": ({}, {}, {"accumulate": 3}),
    "unused parameters": ({}, {"find_unused_parameters": True}, {}),
    "excluded": ({"exclude": ["*.bias", "norm.*"]}, {}, {}),
    "bucket scope": ({"scope": "bucket"}, common.SMALL_BUCKETS, {}),
}
FAR = {"half": 1e-3, "int8": 0.1, "sparse": 0.6}  # from plain DDP after ten steps with momentum


def together(results):
    """The common result of all ranks, which must be the same."""
    assert all(result == results[0] for result in results[1:]), results
    return results[0]


def test_follows_plain_ddp():
    results = launch(training_ranks.parity, 3, FAR, CASES)
    for name, title in itertools.product(FAR, CASES):
        found = [result[name, title] for result in results]
        together([each["digest"] for each in found])
        for each in found:
            assert each["difference"] <= FAR[name], (name, title)
            assert each["report"]["measured"]["steps"] == 10
        strategies = {d["strategy"] for d in found[0]["report"]["decisions"]}
        assert {"half": "allreduce", "int8": "ps", "sparse": "exchange"}[name] in strategies, title
    once, accumulated = (
        results[0]["int8", title]["report"]["measured"] for title in ("one bucket", "accumulation")
    )
    assert accumulated["wire_bytes"] == once["wire_bytes"] < 0.4 * once["ddp_wire_bytes"]


def test_strategies_of_four_ranks():
    cases = {
        name: ({"strategy": name}, common.SMALL_BUCKETS, {}) for name in ("ps", "ring", "exchange")
    }
    results = launch(training_ranks.parity, 4, ["int8"], cases)
    for title in cases:
        found = [result["int8", title] for result in results]
        together([each["digest"] for each in found])
        assert {d["strategy"] for d in found[0]["report"]["decisions"]} == {title}
        assert found[0]["difference"] < 0.1


@pytest.mark.parametrize("name", first_fast(["int8", "half"]))
def test_buckets_do_not_matter(name):
    """State follows the parameter: one bucket or many, before and after DDP rebuilds them."""
    digests, _ = together(
        [(tuple(d), 0) for d, _ in launch(training_ranks.buckets, 2, name, "tensor")]
    )
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_bucket_scope_keeps_state_over_the_rebuild():
    results = launch(training_ranks.buckets, 3, "int8", "bucket")
    together([digests for digests, _ in results])
    for _, losses in results:
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_modes_of_ddp():
    results = launch(training_ranks.variants, 2, "int8")
    for title in results[0]:
        together([result[title][0] for result in results])
        for result in results:
            assert result[title][2] < result[title][1], title


EMPTIES = {
    "one bucket": ({}, {}),
    "verified": ({"verify": True}, common.SMALL_BUCKETS),
    "ring": ({"strategy": "ring"}, {}),
    "exchange": ({"strategy": "exchange"}, common.SMALL_BUCKETS),
    "static graph": ({}, {"static_graph": True}),
    "bucket scope": ({"scope": "bucket"}, common.SMALL_BUCKETS),
    "views": ({"min_size": 0}, {"gradient_as_bucket_view": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ddp_kwargs, most",
    [
        ("none", {}, 1e-6),
        ("none", {"static_graph": True}, 1e-6),
        ("int8", common.SMALL_BUCKETS, 0.02),
    ],
)
def test_a_join_may_divide_by_the_ranks_that_are_still_active(name, ddp_kwargs, most):
    results = launch(training_ranks.divided, 3, name, ddp_kwargs)
    together([digest for *_, digest in results])
    for ours, detached, _ in results:
        assert ours < most
        assert detached < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(["int8", "onebit_group"]))
def test_parameters_without_elements_change_nothing(name):
    results = launch(training_ranks.empties, 2, name, EMPTIES)
    for title in EMPTIES:
        digests = [result[title, empty][0] for result in results for empty in (False, True)]
        assert len(set(digests)) == 1, title
        for _, installed, whys in (result[title, True] for result in results):
            assert installed
            assert whys == {"no elements"}


@pytest.mark.parametrize(
    "options",
    [{"compressor": "none", "verify": True}, {"policy": hipress.Accordion("topk", 0.5, 0.1)}],
)
def test_complex_parameters_are_averaged_and_verified(options):
    """A policy once took them for half as long as they are."""
    results = launch(training_ranks.complex_numbers, 2, options)
    if results == [None, None]:
        pytest.skip("gloo has no complex numbers here")
    for ours, plain in results:
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other)


def test_float64_travels_as_it_is():
    for (plain, ours), why in launch(training_ranks.doubles, 2):
        assert torch.equal(plain[0], ours[0])
        assert not torch.equal(ours[0], ours[0].float().double())
        assert not torch.equal(plain[1], ours[1])
        assert why == "type float64 is not compressed"


def test_steps_are_counted_where_ddp_leaves_buckets_out():
    assert launch(training_ranks.skipped_buckets, 2) == [[(3, 3)] * 2] * 2


#: by compressor, the largest loss after the step; residuals of rounds may be of a scaled loss still
FINITE = {"int8": 10, "randomk": 20, "thc": 20, "powersgd": sys.float_info.max}


def test_infinity_reaches_every_rank_and_no_residual():
    results = launch(training_ranks.infinity, 2, FINITE)
    for name, most in FINITE.items():
        together([result[name][-1] for result in results])
        for infected, clean, skipped, losses, _ in (result[name] for result in results):
            assert all(infected), name
            assert clean, name
            assert skipped == [True, False], name
            assert losses[-1] < most, name


def test_a_device_mesh_tells_who_averages():
    """All ranks of the job once did, also those that train other models."""
    for rank, (gradient, (dimensions, both)) in enumerate(launch(training_ranks.meshed, 2)):
        assert gradient == 1 + rank
        assert "device_mesh has 2 dimensions" in dimensions
        assert "pass one of them" in both


def test_process_group_of_some_ranks():
    outsider, *members = launch(training_ranks.subgroup, 3, "int8")
    assert outsider is None
    together(members)
