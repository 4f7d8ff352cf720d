"""hipress.shard: FSDP2's collectives, compressed."""

from __future__ import annotations

import pytest

from tests.hipress import sharding_ranks as ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast


@pytest.mark.parametrize(
    "cases", [ranks.FAST, pytest.param(ranks.SLOW, marks=pytest.mark.slow)], ids=["common", "rare"]
)
def test_uncompressed_steps_are_those_of_fsdp2_bit_for_bit(cases):
    for found in launch(ranks.beside_native, 2, cases):
        for case, (native, ours, sent) in found.items():
            assert ours == native, case
            assert sent, case


def test_weights_are_gathered_in_inference_mode():
    """With mixed precision threads could not write to FSDP's memory, which that mode had made."""
    for inside, outside, further in launch(ranks.evaluated, 2):
        assert inside == outside
        assert further > 0


@pytest.mark.slow
def test_weights_that_nodes_keep_after_the_forward_pass_are_gathered_inside():
    for (theirs, their_shards), (ours, our_shards) in launch(ranks.kept_in_halves, 4):
        assert ours == pytest.approx(theirs, rel=1e-4)
        for one, other in zip(our_shards, their_shards, strict=True):
            assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("size", first_fast([2, 3]))
def test_ranks_compute_with_the_same_bits_of_compressed_weights(size):
    results = launch(ranks.compressed, size)
    assert len({digest for _, digest, *_ in results}) == 1
    for losses, _, exact, report, text in results:
        assert losses[-1] < 0.9 * losses[0]
        assert exact
        assert report["bytes_sent"] < report["native_bytes"] / 3
        codecs = {each["name"]: each["codec"] for each in report["decisions"]["reduce_scatter"]}
        for argument, strategy in (("reduce_scatter", "push"), ("all_gather", "pull")):
            assert {each["strategy"] for each in report["decisions"][argument]} == {strategy}
            assert f"{argument}: elements of this rank's shards" in text
        assert codecs["head.weight"] == "int8_group"
        assert codecs["blocks.1.first.weight"] == "int4_group"
        assert codecs["blocks.1.first.bias"] is codecs["blocks.1.norm.weight"] is None
        assert "int8_group  pull" in text


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3]], [[0, 2, 3], [1]]])
def test_shards_on_nodes_of_several_ranks_are_added_up_inside(nodes):
    results = launch(ranks.between_nodes, 4, nodes)
    assert len({digest for _, _, digest, _ in results}) == 1
    for (native, ours), losses, _, used in results:
        assert ours == native
        assert losses[-1] < 0.9 * losses[0]
        assert used == [{"hierarchical_push"}, {"hierarchical_pull"}]


@pytest.mark.slow
def test_uncompressed_replicas_are_those_of_hsdp_bit_for_bit():
    for found in launch(ranks.beside_hsdp, 4):
        for case, (native, ours) in found.items():
            assert ours == native, case


def test_a_topology_is_that_of_the_shards_and_not_of_replicas():
    assert all(launch(ranks.replicas_of_one, 2))


@pytest.mark.slow
def test_replicas_of_one_bit_stay_the_same_and_learn():
    results = launch(ranks.replicas, 4)
    assert [held for _, held, *_ in results[:2]] == [held for _, held, *_ in results[2:]]
    for losses, _, report, kept, other in results:
        assert losses[-1] < 0.9 * losses[0]
        assert report["bytes_sent"] < report["native_bytes"] / 5
        assert report["state_bytes"] > 0
        assert "blocks.1.branch.weight" in kept
        assert "blocks.1.norm.weight" not in kept
        assert other.kind == "StateError"
        assert "saved by rank 0 of 5, 0 of 2, this is rank " in other.message


@pytest.mark.slow
@pytest.mark.parametrize("detaches", [False, True])
def test_a_rank_may_leave_when_it_has_its_last_sums(detaches):
    """Another rank, which still received from a third, once failed."""
    _, *others = launch(ranks.slow_at_last, 3, detaches, may_die=[0])
    assert [len(losses) for losses in others] == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["shards", "replicas"])
def test_ranks_that_use_other_parameters_are_told(of):
    exchange = (
        "push of blocks.2: parameters 0, 1, 2, 3, 4, 5" if of == "shards" else "ps of blocks.2"
    )
    used = ("0, 1, 2, 3, 4, 5", "0, 1, 2, 3, 4, 5, 6, 7")
    for (text, notes), mine in zip(launch(ranks.parted, 2, of), used, strict=True):
        assert f"parameters {mine} of 8 of 'blocks.2' have gradients here, and all " in notes[-1]
        assert f"to exchange '{exchange}'" in text
        assert "cut off" not in text


def test_one_rank_installs_nothing():
    ((losses, told, report, installed),) = launch(ranks.alone, 1)
    assert len(losses) == 2
    assert not installed
    assert any("one rank holds all shards, so nothing is installed" in line for line in told)
    assert "nothing is installed for one rank" in report


def test_parts_of_a_job_that_train_apart_are_told():
    for told in launch(ranks.parts, 2):
        assert told == {"whole": 0, "apart": 1, "replicas": 0, "hsdp": 0}


def test_what_cannot_be_sharded_is_refused():
    launch(ranks.refused, 2)
