"""Gossip on real processes: parameters approach each other, through neighbours alone."""

from __future__ import annotations

import itertools

import pytest

from hipress import OuterSGD
from tests.hipress import gossip_ranks as ranks
from tests.hipress.launch import launch
from tests.hipress.test_training import together
from tests.tiers import first_fast

TOPK = {"ratio": 0.1, "min_size": 0}
CASES = {
    "ring": ("ring", "int4_group", {}, 40, 10),
    "torus": ("torus", "int4_group", {"gamma": 0.9}, 20, 5),
    "ring, topk": ("ring", "topk", TOPK, 80, 40),
    "complete": ("complete", "int4_group", {}, 20, 5),
    "torus, topk": ("torus", "topk", TOPK, 80, 40),
    "complete, topk": ("complete", "topk", TOPK, 80, 40),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, titles",
    first_fast([(4, [*CASES][:1]), (4, [*CASES][1:]), (6, [*CASES])]),
)
def test_ranks_come_nearer_at_a_linear_rate_and_their_average_stays(world_size, titles):
    results = launch(ranks.converging, world_size, {title: CASES[title] for title in titles})
    for title in titles:
        together([result[title][0] for result in results])  # one distance on all ranks
        for far, moved, fits in (result[title] for result in results):
            assert far[0] > 0.5, title
            for sooner, later in itertools.pairwise(far):
                assert later < max(0.55 * sooner, 1e-5), (title, far)
            assert moved < 1e-5, title
            assert fits, title


def test_rounds_of_local_steps_are_those_of_outer_on_any_graph():
    for difference, far, moved, text in launch(ranks.rounds, 4):
        assert difference < 1e-5
        assert far[0] > 0.5
        assert far[-1] < 1e-2 * far[0]
        assert moved < 1e-5
        assert "every 2 steps, OuterSGD(lr=1.0, momentum=0.5" in text


ROUNDS = {"every": 4, "outer": OuterSGD(0.7, 0.5)}


@pytest.mark.parametrize(
    "name, params",
    first_fast([("int4_group", {}), ("topk", TOPK), ("int4_group", ROUNDS)]),
)
def test_training_and_states_that_do_not_fit(name, params):
    results = launch(ranks.trained, 3 if name == "topk" else 2, name, params)
    for losses, (near, far), (text, why, sent), mixed, broken, elsewhere in results:
        assert losses[-1] < losses[0]
        assert 0 < near < far
        assert "Ranks differ by design" in why
        assert ("error feedback" in why) == (name == "topk")
        assert "gossip" in text
        assert sent > 0
        assert mixed[0] == "StateError"
        assert "of rank 1" in mixed[1]
        assert broken[0] == "SyncError"
        assert elsewhere[0] == "StateError"
        assert "strategy gossip:ring, this is gossip:complete" in elsewhere[1]


def test_bad_options_raise_one_error_on_every_rank():
    launch(ranks.refusals, 3)


def test_parameters_of_every_kind():
    for started, (far, near), moved, (frozen, stride), codecs in launch(ranks.odd, 2):
        assert started == 0
        assert near < 0.02 * far
        assert moved < 1e-3  # of bfloat16
        assert frozen == [0, 0, 0]  # broadcast, and left alone
        assert stride == (1, 40)
        assert codecs == {
            "table": "int4_group",
            "turned": "uncompressed",
            "short": "fp16",
            "none": "uncompressed",
            "words.weight": "int4_group",
        }


def test_a_single_rank_has_nobody_to_ask():
    assert launch(ranks.alone, 1) == [(True, 0.0, {})]
