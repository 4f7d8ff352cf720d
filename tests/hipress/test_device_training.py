"""Training by DDP on devices, which are emulated: as on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.hipress import device_training_ranks
from tests.hipress.common import SMALL_BUCKETS
from tests.hipress.launch import launch
from tests.tiers import first_fast

FIRST = {
    "no_sync": {"accumulate": 3},
    "scaler": {"dtype": torch.bfloat16, "scaler": True},
    "unused": {"ddp_kwargs": SMALL_BUCKETS | {"find_unused_parameters": True}},
}
OTHERS = {
    "static_graph": {"ddp_kwargs": SMALL_BUCKETS | {"static_graph": True}},
    "views": {"ddp_kwargs": SMALL_BUCKETS | {"gradient_as_bucket_view": True}},
    "compile": {"compile": True, "ddp_kwargs": {}},
    "float16": {"dtype": torch.float16},
    "synchronizer": {"sync": True},
}


@pytest.mark.parametrize("ways", first_fast([FIRST, OTHERS]))
def test_ways_to_train(ways):
    first, other = launch(device_training_ranks.by_way, 2, ways)
    assert first == other
    for title, (there, here) in first.items():
        assert there == here, title


@pytest.mark.slow
def test_shards():
    for found in launch(device_training_ranks.shards, 2):
        assert found["staged"] == found["nccl"] == found[None]
