"""All ways in alike: ranks that end or fall silent, states, and threads."""

from __future__ import annotations

import pytest
import torch

import hipress
from tests.hipress import common
from tests.hipress import ways_ranks as ranks
from tests.hipress.launch import DIED, launch
from tests.patience import HANG
from tests.tiers import first_fast


@pytest.mark.parametrize("way", ranks.WAYS)
def test_a_rank_that_is_killed_is_named_and_others_train_on_with_a_newcomer(way):
    """They once heard why the old group had ended, and ended, too."""
    first, dead, *others = launch(ranks.regroup, 4, way, may_die=[1])
    assert dead == DIED
    for lost, again, _, _ in (first, others[0]):
        assert lost.kind == "RankLost"
        assert "rank 1 ended" in lost.message.split("\n")[0]
        assert lost.seconds < HANG / 4
        assert again.kind != "none"
    for *_, found, parameters in (first, *others):
        assert found.kind == "none", found.message
        assert parameters == first[-1] or way == "Gossip"


ROUNDS = {"every": 4, "outer": hipress.OuterSGD(0.7, 0.5)}
NODES = {"strategy": "hierarchical", "topology": [[0, 1], [2]]}
WARMUP = hipress.Warmup("dgc", ratios=(0.3, 0.1, 0.01), steps=3)
#: by title: way in, compressor, options
STATES = {way: (way, "", {}) for way in ranks.WAYS if way != "all_reduce"} | {
    "rebuilt buckets": ("wrap", "int8", {"ddp_kwargs": common.SMALL_BUCKETS}),
    "lengths that vary": ("wrap", "sparse", {"ddp_kwargs": common.SMALL_BUCKETS}),
    "bucket scope": ("wrap", "int8", {"scope": "bucket"}),
    "topk": ("wrap", "topk", {"ratio": 0.1}),
    "residuals of 16 bits": ("wrap", "onebit_group", {"residual": "bfloat16", "strategy": "ps"}),
    "shared draws": ("wrap", "randomk", {"ratio": 0.1}),
    "rounds": ("wrap", "thc", {}),
    "factors": ("wrap", "powersgd", {}),
    "references": ("Synchronizer", "ef21", {}),
    "both directions": ("wrap", "sparse", {"down": common.codec("int8"), "min_size": None}),
    "levels": ("wrap", "auto", {"policy": WARMUP}),
    "gossip of local steps": ("Gossip", "int4_group", ROUNDS),
    "amid a round": ("Outer", "onebit_group", {"every": 4, "delay": 3}),
    "fragments": ("Outer", "onebit_group", {"every": 4, "fragments": 2}),
    "momentum of a round": ("Outer", "dgc", {"every": 4, "delay": 3}),
}
OF_THREE = {
    "nodes": ("wrap", "int8", NODES),
    "neighbours": ("Gossip", "topk", {"ratio": 0.1}),
}


@pytest.mark.parametrize("world_size, cases", [(2, STATES), (3, OF_THREE)])
def test_a_training_goes_on_bit_for_bit(world_size, cases, tmp_path):
    """A rank's file and torch.distributed.checkpoint keep all of its state."""
    for found in launch(ranks.resumes, world_size, str(tmp_path), cases):
        assert {t: len({*digests}) for t, digests in found.items()} == dict.fromkeys(cases, 1)


#: a bucket of uncompressed gradients, which comes first, from the first step on
APART = {"exclude": "last.*", "ddp_kwargs": {"bucket_cap_mb": 0.0001, **common.UNREBUILT}}


@pytest.mark.parametrize(
    "way, options, dtype",
    first_fast(
        [
            *((way, {}, None) for way in ranks.WAYS if way not in ("attach", "momentum")),
            ("wrap", {}, torch.bfloat16),
            ("wrap", APART, None),
        ]
    ),
)
def test_a_rank_that_is_silent_is_named(way, options, dtype):
    """Each kind of bucket obeys `timeout`, though the group's own is much longer."""
    *waiting, _ = launch(ranks.silent, 2, way, options, dtype)
    for found, again in waiting:
        # gloo's sums may see the other rank's own end of patience first
        assert found.kind in ("AgreementTimeout", *["RankLost"] * (options is APART)), found
        assert "rank 1" in found.message
        assert found.seconds < HANG / 4
        assert again.kind != "none"


@pytest.mark.parametrize("way", first_fast(["Synchronizer", "wrap", "Gossip", "all_reduce"]))
def test_a_rank_that_ended_before_another_training(way):
    """The others once waited for it until the time-out."""
    (kind, message, seconds), dead = launch(ranks.ended_between, 2, way, may_die=[1])
    assert dead == DIED
    assert kind == "RankLost"
    assert "rank 1 ended" in message.split("\n")[0]
    assert seconds < HANG / 4


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_ends_before_the_first_step_of_auto(late):
    """An IndexError once hid its name; the step was "step -1". A rank that had failed kept its
    connections, and others waited for it."""
    *waiting, dead = launch(ranks.ended_before_a_step, 3, late, may_die=[2])
    assert dead == DIED
    for kind, message, seconds in waiting:
        assert kind == "RankLost"
        assert "rank 2 ended" in message.split("\n")[0]
        assert "-1" not in message
        assert seconds < HANG / 4


@pytest.mark.parametrize("way", ["all_reduce", "group", "Outer"])
def test_an_uncaught_exception_is_told(way):
    """All ways in tell the other ranks, which once saw only that it ended."""
    *others, dead = launch(ranks.uncaught, 3, way, False, may_die=[2])
    assert dead == DIED
    for kind, message, seconds in others:
        assert kind == "RankLost"
        assert message.startswith("rank 2 failed during ")
        assert message.split("\n")[0].endswith(": ValueError: no such word")
        assert seconds < HANG / 4


def test_an_uncaught_exception_is_told_in_collectives_of_torch():
    """They once named no rank after an all_reduce."""
    *others, dead = launch(ranks.uncaught, 2, "all_reduce", True, may_die=[1])
    assert dead == DIED
    for notes in others:
        assert notes == ["rank 1 failed: ValueError: no such word"]


@pytest.mark.parametrize(
    "way, name, options, most",
    [
        ("wrap", "onebit_group", {}, 1e-5),
        ("wrap", "onebit_group", {"residual": "bfloat16"}, 0.02),
        ("wrap", "topk", {"ratio": 0.05}, 1e-5),
        ("wrap", "powersgd", {"rank": 1}, 1e-5),
        ("Synchronizer", "onebit_group", {}, 1e-5),
    ],
)
def test_residuals_outlast_steps_in_which_a_parameter_is_unused(way, name, options, most):
    for error, there in launch(ranks.now_and_then, 2, way, name, options):
        assert error < most
        assert there == 3 * [True, False, True]


def test_threads_and_connections_end():
    for found in launch(ranks.let_go, 2, LEAVING):
        for way, (training, detached) in found.items():
            assert training > detached == 0, way


LEAVING = [way for way in ranks.WAYS if way not in ("group", "all_reduce", "attach")]
