"""Policies on gradients of known structure."""

from __future__ import annotations

import math

import pytest
import torch

import hipress
from hipress.errors import ConfigError
from hipress.policies import DENSE, Gains, Norms, roundtrip
from tests.hipress import policy_ranks
from tests.hipress.fakes import Int8, Sparse
from tests.hipress.launch import launch
from tests.tiers import first_fast

RATIOS = (0.1, 0.01, 0.001)
LEVELS = [f"topk level {number}" for number in range(3)]


def gravac(**more):
    return hipress.GraVAC("topk", RATIOS, window=4, every=2, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, kept",
    [("one in a hundred", LEVELS[1]), ("one in a thousand", LEVELS[2]), ("even", None)],
)
def test_gravac_keeps_the_ratio_that_the_gradients_bear(kind, kept):
    """Times of steps are noise here, but `flat` makes all scores equal: of the ratios that keep
    enough, the most compressed one stays."""
    (found, policy, digest, text), *others = launch(
        policy_ranks.chosen, 2, kind, 25, gravac(flat=0.99)
    )
    assert policy.startswith("GraVAC(compressor='topk'")
    assert "by GraVAC" in " ".join(text.split())
    assert all(other[0] == found and other[2] == digest for other in others)
    assert [codecs[0] for codecs in found[:4]] == [None] * 4  # before any measurement
    assert {codecs[0] for codecs in found[-4:]} == {kept}
    assert found[-1][0] == found[-1][1]


def test_gravac_without_ddp():
    results = launch(
        policy_ranks.chosen, 2, "one in a hundred", 25, gravac(flat=0.99), "synchronizer"
    )
    assert {codecs[0] for codecs in results[0][0][-4:]} == {LEVELS[1]}
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("slower", first_fast([None, 17]))
def test_accordion_compresses_what_no_longer_changes(slower):
    """A window of five. At first the lower level holds; then the higher one for the parameter with
    constant gradients, until the rate falls, and the lower one for that with falling gradients."""
    policy = hipress.Accordion("topk", low=0.1, high=0.01, window=5)
    first, *others = launch(policy_ranks.still, 2, policy, slower)
    assert all(other == first for other in others)
    expected = [0] * 10 + [1] * 15 if slower is None else [0] * 10 + [1] * 10 + [0] * 5
    assert [codecs[0] for codecs in first] == [LEVELS[level] for level in expected]
    assert {codecs[1] for codecs in first} == {LEVELS[0]}


@pytest.mark.parametrize("strategy", first_fast(["exchange", "ps"]))
def test_nothing_is_lost_as_levels_change(strategy):
    results = launch(policy_ranks.handed_on, 2, "topk", strategy)
    for off, labels in results:
        assert off < 1e-5
        assert labels == [LEVELS[level] for level in (0, 0, 1, 1, 2, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, strategy, scope",
    first_fast(
        [
            ("gravac", "ps", "tensor"),
            ("gravac", "exchange", "bucket"),
            ("accordion", "ring", "tensor"),
            ("accordion", "exchange", "tensor"),
            ("warmup", "ps", "bucket"),
        ]
    ),
)
def test_a_resumed_training_loses_no_gradient(policy, strategy, scope):
    """At whatever step; GraVAC once began uncompressed, and dropped all residuals."""
    for found in launch(policy_ranks.nothing_lost, 2, policy, strategy, scope):
        assert any(sum(saved) > 0 for *_, (saved, _) in found)
        for moment, (off, labels, (saved, loaded)) in enumerate(found, 1):
            assert off < 1e-5, (moment, labels)
            assert saved == loaded
            if moment % 2:  # in the middle of a window
                assert labels[moment] == labels[moment - 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, options, told",
    [
        (hipress.GraVAC("int4_group", RATIOS), {}, "GraVAC: compressor 'int4_group'"),
        (hipress.Warmup("tpok", RATIOS), {}, "Warmup: unknown compressor 'tpok'"),
        (hipress.Accordion("topk", {"rate": 1}, {"rate": 2}), {}, "parameter 'rate'"),
        (hipress.Warmup("topk", RATIOS), {"compressor": "dgc"}, "leave compressor out"),
        (hipress.Warmup("topk", RATIOS), {"ratio": 0.1}, "belong in the policy's levels"),
        (hipress.Warmup("topk", RATIOS), {"down": "int4_group"}, "not with a policy"),
        (hipress.Warmup("topk", RATIOS), {"strategy": "allreduce"}, "do not add"),
        (hipress.GraVAC("randomk", ({"ratio": 0.1, "residual": False}, 0.01)), {}, "randomk"),
        (hipress.Warmup("topk", (0.01, 0.1)), {}, "Warmup: levels go from the least compressed"),
        (hipress.Accordion("topk", 0.01, 0.1), {}, "ratio=0.01), which compresses more, comes"),
        (hipress.GraVAC("powersgd", ({"rank": 1}, {"rank": 2})), {}, "rank=1), which compresses"),
        (hipress.GraVAC, {}, "policy is one such as"),
        ("gravac", {}, "policy is one such as"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be_are_named_on_every_rank(policy, options, told):
    results = launch(policy_ranks.refused, 2, policy, options)
    for (kind, message), _ in results:
        assert kind == "ConfigError"
        assert told in message
    (zero, one) = (both for _, both in results)
    assert zero[0] in ("ConfigMismatch", "ConfigError")
    assert one[0] in ("ConfigMismatch", "ConfigError")


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: hipress.GraVAC("topk", (0.1,)), "at least 2 ratios"),
        (lambda: hipress.GraVAC("topk", "abc"), "at least 2 ratios"),
        (lambda: hipress.GraVAC("topk", RATIOS, least=1.5), "least is between 0 and 1, not 1.5"),
        (lambda: hipress.GraVAC("topk", RATIOS, flat=-1), "flat is at least 0"),
        (lambda: hipress.GraVAC("topk", RATIOS, window=0), "window is at least 1, not 0"),
        (lambda: hipress.GraVAC("topk", RATIOS, every=99), "every is at least 1, and at most"),
        (lambda: hipress.GraVAC(None, RATIOS), "name or path of a spec, not None"),
        (lambda: hipress.Accordion("topk", True, 0.1), "at least 2 ratios"),
        (lambda: hipress.Accordion("topk", 0.1, 0.01, threshold=0), "threshold is above 0"),
        (lambda: hipress.Accordion("topk", 0.1, 0.01, window=1.5), "window is at least 1"),
        (lambda: hipress.Warmup("topk", RATIOS, steps=0), "steps is at least 1, not 0"),
    ],
)
def test_settings_that_cannot_be(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_two_levels_that_are_one():
    results = launch(policy_ranks.refused, 1, hipress.Warmup("topk", (0.1, {"ratio": 0.1})), {})
    assert "two of its levels are the same" in results[0][0][1]


def test_warmup_is_a_staircase():
    state = hipress.Warmup("dgc", RATIOS, steps=10).new_state([], 1)
    assert [state.level(step, 0) for step in (0, 9, 10, 19, 20, 10**6)] == [0, 0, 1, 1, 2, 2]
    assert state.window == 0


def gains(flat=0.05, levels=4):
    return Gains([Int8()] * levels, window=5, every=1, least=0.75, flat=flat)


def windows(state, *measured):
    """Candidates and levels after windows. Each window has gains of the first level and of the
    candidate, and seconds."""
    found = []
    for first, candidate, seconds in measured:
        state.decide([1.0, first, candidate], seconds)
        found.append((state.candidate, state.level(0, 0)))
    return found


def test_the_search_goes_on_while_it_gains():
    """Candidate 1 is sent in the second window and scores .9/1; 2 scores .85/.5, 3 .8/.3."""
    found = windows(
        gains(), (0.95, 0.9, 1.0), (0.95, 0.9, 1.0), (0.95, 0.85, 1.0), (0.95, 0.85, 0.5),
        (0.95, 0.8, 0.5), (0.95, 0.8, 0.3), (0.95, 0.8, 0.3),
    )  # fmt: skip
    assert found == [(1, 1), (2, 0), (2, 2), (3, 0), (3, 3), (3, 3), (3, 3)]


def test_the_search_ends_where_two_are_as_good():
    state = gains(flat=0.2)
    windows(state, (0.95, 0.9, 1.0), (0.95, 0.9, 1.0), (0.95, 0.9, 1.0), (0.95, 0.9, 0.9))
    assert not state.searching
    assert (state.candidate, state.level(0, 0)) == (2, 2)  # the more compressed one


def test_a_candidate_that_keeps_too_little_ends_it():
    state = gains()
    found = windows(state, (0.95, 0.9, 1.0), (0.95, 0.9, 1.0), (0.95, 0.3, 1.0))
    assert found[-1] == (1, 1)
    assert not state.searching


def test_nothing_is_compressed_if_the_first_level_keeps_too_little():
    assert windows(gains(), (0.5, 0.1, 1.0)) == [(1, DENSE)]
    assert windows(gains(), (0.9, 0.1, 1.0)) == [(1, 0)]
    state = gains()
    state.decide([0.0, 0.0, 0.0], 1.0)  # no gradients: no measurement
    assert state.level(0, 0) == DENSE


def test_gains_are_energies():
    """The first level keeps 25 of 26, in 3 and 4 and many small values; the candidate gets that."""
    codec = Sparse()
    state = Gains([codec, codec], window=5, every=2, least=0.5, flat=0.1)
    values = torch.full((100,), 0.1)
    values[:2] = torch.tensor([3.0, 4.0])
    assert [state.measures(step) for step in range(4)] == [True, False, True, False]
    state.observe(0, values)
    kept = roundtrip(codec, values)
    again = roundtrip(codec, kept)
    whole, low, high = state.measured()
    assert whole == pytest.approx(25.98, rel=1e-4)
    assert low == pytest.approx(float(kept @ kept)) == pytest.approx(25)
    assert high == pytest.approx(float(again @ again)) == pytest.approx(25)
    assert state.measured() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_counts_for_nothing(bad):
    """GradScaler's first, for example, once kept GraVAC and Accordion from compressing for good."""
    states = [Gains([Sparse()] * 2, 5, 1, 0.5, 0.1), Norms(1, 5, 0.5, lambda: 0.1)]
    values = torch.full((100,), 2.0)
    taken = []
    for more in ([], [torch.tensor([bad, *values[1:]])]):
        for state in states:
            for each in (*more, values, *more):
                state.observe(0, each)
                state.averaged(0, each)
            taken.append(state.measured())
    assert taken[:2] == taken[2:]


def test_norms_are_of_summed_gradients():
    state = Norms(2, window=5, threshold=0.5, rate=lambda: 0.1)
    for sign in (1, -1, 1):
        state.averaged(0, torch.full((4,), float(sign)))
        state.averaged(1, torch.full((4,), 2.0))
    assert state.measured() == pytest.approx([2.0, 12.0, 0.1])
    assert state.measured() == pytest.approx([0.0, 0.0, 0.1])
