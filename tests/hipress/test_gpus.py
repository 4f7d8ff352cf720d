"""Two ranks on GPUs, by each transport: averages, choices, and ranks that are lost.

Without a GPU, devices are emulated.
"""

import pytest

from tests.hipress import gpu_ranks
from tests.hipress.launch import DIED, launch

pytestmark = pytest.mark.slow
for_two = pytest.mark.gpu(ranks=2)
or_emulated = pytest.mark.gpu(ranks=2, emulated=True)
#: not "auto", whose choice depends on times; the emulated device lacks what two others call
WAYS = [
    pytest.param(name, marks=for_two if name in ("powersgd", "AdamW") else or_emulated)
    for name in gpu_ranks.WAYS
    if name != "auto"
]
#: bindings of NCCL, and if programs are captured; none of them on an emulated device
BY_NCCL = [
    pytest.param(binding, capture, marks=for_two)
    for binding in ("nccl", *gpu_ranks.BINDINGS)
    for capture in (False, True)
]
BY_ALL = [pytest.param("staged", False, marks=or_emulated), *BY_NCCL]
BY_PLACE = [
    pytest.param(each, marks=for_two if each == "nccl" else or_emulated)
    for each in gpu_ranks.TRANSPORTS
]


def agreed(transports, ways, **options):
    """Digests and choices, which all transports and ranks have in common, by way."""
    found = {by: launch(gpu_ranks.trained, 2, by, ways, **options) for by in transports}
    first = found[transports[0]][0]
    for by, ranks in found.items():
        for rank, told in enumerate(ranks):
            for name in ways:
                assert told[name] == first[name], (by, rank, name)
    return first


@pytest.mark.parametrize("name", WAYS)
def test_gpu_transports_agree_bit_by_bit(name):
    agreed(gpu_ranks.TRANSPORTS, [name])


@pytest.mark.parametrize("binding, capture", BY_NCCL[1:])
def test_gpu_bindings_agree_bit_by_bit(binding, capture):
    ways = list(gpu_ranks.CAPTURED)
    first, other = launch(gpu_ranks.trained, 2, binding, ways, capture)
    assert first == other == agreed(["staged"], ways)


@for_two
@pytest.mark.parametrize("binding", ["nccl", *gpu_ranks.BINDINGS])
def test_gpu_graphs_are_tried_by_default_and_change_no_bit(binding):
    """The trial of both ends within these steps."""
    steps, ways = 40, ["onebit_group", "topk", "powersgd"]
    first, other = launch(gpu_ranks.trained, 2, binding, ways, "auto", steps)
    plain, _ = launch(gpu_ranks.trained, 2, binding, ways, False, steps)
    assert first == other
    for name in ways:
        digest, tried = first[name]
        assert digest == plain[name][0], name
        assert len(tried) == 2, tried
        assert "could not be captured" not in [verdict for _, verdict in tried], tried


@pytest.mark.parametrize("transport", BY_PLACE)
def test_gpu_ranks_take_the_same_choice(transport):
    first, other = launch(gpu_ranks.trained, 2, transport, ["auto"])
    assert first == other
    tried = first["auto"][1]
    assert [verdict for _, verdict in tried].count("kept") == 1, tried


@for_two
def test_gpu_ranks_of_an_nccl_process_group():
    (digest, told), other = launch(gpu_ranks.by_nccl, 2)
    assert digest == other[0]
    assert "onebit_group" in told


@or_emulated
def test_gpu_shards_are_summed_and_gathered():
    results = launch(gpu_ranks.shards, 2)
    for native, plain, packed in results:
        assert plain[0] == pytest.approx(native[0], rel=1e-5)
        assert packed[0][-1] < 0.95 * packed[0][0]
    assert len({packed[1] for *_, packed in results}) == 1


@for_two
def test_gpu_replicas_of_fsdp2_are_averaged_by_a_group():
    results = launch(gpu_ranks.replicas, 2)
    for native, plain, packed in results:
        assert plain[0] == pytest.approx(native[0], rel=1e-5)
        assert packed[0][-1] < 0.9 * packed[0][0]
        assert "all-reduce  yes" in packed[2]
        assert all(equal for _, equal, _ in (native, plain, packed))


@for_two
@pytest.mark.parametrize("way", ["compiled", "scaled"])
def test_gpu_models_that_are(way):
    (losses, first), (_, other) = launch(gpu_ranks.composed, 2, way)
    assert first == other
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("binding, capture", BY_ALL)
def test_gpu_rank_that_is_lost(binding, capture, how):
    (kind, message, seconds), dead = launch(
        gpu_ranks.lost, 2, binding, how, capture, may_die=[1], timeout=100
    )
    assert dead == DIED
    assert kind in LOST
    assert "rank 1" in message
    assert seconds < 4 * gpu_ranks.PATIENCE


LOST = ("AgreementTimeout", "RankLost", "SyncError")


@pytest.mark.parametrize("binding, capture", BY_ALL)
def test_gpu_rank_that_is_late(binding, capture):
    first, other = launch(gpu_ranks.lost, 2, binding, "late", capture)
    assert first[0][0] == other[0][0] == "none"
    assert first[1] == other[1]


@pytest.mark.parametrize("binding, capture", BY_ALL)
def test_gpu_ranks_wrap_again_after_an_abort(binding, capture):
    first, other = launch(gpu_ranks.lost, 2, binding, "too late", capture)
    assert first[0][0] in LOST
    assert "rank 1" in first[0][1]
    assert first[1] == other[1]
