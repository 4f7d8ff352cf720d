"""Models sharded by FSDP2 or tensor parallelism, synchronized between their replicas."""

from __future__ import annotations

import pytest

from hipress.engine.order import LARGE_BYTES
from tests.hipress import shards_ranks as ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast

REPLICAS = ((0, 2), (1, 3))  # which ranks hold the same shards


def alike(results):
    """The common result of each pair of replicas, which must be the same."""
    for one, other in REPLICAS:
        assert results[one] == results[other]
    return [results[one] for one, _ in REPLICAS]


@pytest.mark.slow  # compressed replicas are fast
@pytest.mark.parametrize("large", [64, LARGE_BYTES])
def test_uncompressed_steps_are_those_of_hsdp_bit_for_bit(large):
    for cases in launch(ranks.beside_hsdp, 4, large):
        for title, (theirs, ours) in cases.items():
            assert ours == theirs, title


@pytest.mark.parametrize(
    "codec, most", first_fast([("onebit_group", 1.3), ("int4_group", 4.6), ("dgc", 2.0)])
)
def test_compressed_replicas_stay_the_same_and_learn(codec, most):
    results = launch(ranks.compressed, 4, codec)
    alike([held for _, held, _ in results])
    for losses, _, bits in results:
        assert losses[-1] < 0.7 * losses[0]
        assert bits < most


@pytest.mark.slow
def test_momentum_of_shards_is_averaged():
    results = launch(ranks.averaged, 4)
    alike([held for _, held, _, _ in results])
    for losses, _, averaging, (clipped, auto) in results:
        assert averaging
        assert losses[-1] < 0.7 * losses[0]
        assert "max_norm needs whole gradients" in clipped
        assert 'freeze="auto" needs all of v' in auto


@pytest.mark.slow
def test_an_optimizer_may_step_shards_as_averages_arrive():
    for outside, inside in launch(ranks.stepped, 4):
        assert inside == outside


@pytest.mark.slow
def test_gathered_fsdp_parameters_cause_no_errors():
    for begun, stepped in alike(launch(ranks.gathered, 4)):
        assert begun != stepped


@pytest.mark.slow
def test_gradients_unused_on_one_replica_are_averaged_and_unused_on_all_stay_none():
    for steps in launch(ranks.unused, 4):
        twice, once = steps
        assert twice == [[8.0], [8.0], [4.0], [4.0], None, None]
        assert once == [[4.0], [4.0], [2.0], [2.0], None, None]


def test_tensor_parallelism():
    assert max(launch(ranks.in_parts, 4)) < 1e-6


@pytest.mark.slow
def test_shards_that_cannot_be_averaged_are_refused_and_drift_is_warned_of():
    for rank, found in enumerate(launch(ranks.refused, 4)):
        overlap, hsdp, crossed, wrap, older, gossip, changed, single, told = found
        for kind, message in (overlap, hsdp):
            assert kind == "ConfigError"
            assert "'scale' is a DTensor on a mesh that has rank" in message
            assert 'process_group=mesh["replicate"].get_group()' in message
        assert crossed[0] == "ConfigMismatch"
        assert "shards" in crossed[1]
        assert wrap[0] == older[0] == gossip[0] == "ConfigError"
        assert "hipress.Synchronizer averages replicas" in wrap[1]
        assert "fully_shard" in older[1]
        assert "gossip averages whole parameters" in gossip[1]
        assert changed[0] == "SyncError"
        assert "was used between its backward pass and sync.step()" in changed[1]
        assert "pass tensor.to_local()" in single[1]
        whole = "fully_shard left 7 parameters whole, such as 'scale'"
        assert any(whole in line for line in told) == (rank < 2)


@pytest.mark.slow
def test_a_rank_that_ends_is_named_also_by_those_that_wait_in_fsdp(tmp_path):
    launch(ranks.ended, 4, str(tmp_path), may_die=range(4))
    told = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    assert sorted(told) == [0, 1, 2]
    for text in told.values():
        assert "rank 3 ended" in text
