"""GPUs of tests with two ranks: one each, or one for both, which NCCL allows from 2.30 on.

Ranks share a GPU if NCCL_MULTI_RANK_GPU_ENABLE=1; libnccl 2.30 or later must then be loaded, and
NCCL_MAX_CTAS=4 leaves room for both.
"""

import os

import pytest
import torch

HERE = torch.cuda.is_available()
SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
ENOUGH = torch.cuda.device_count() > (0 if SHARED else 1)

_reason = "NCCL needs two GPUs, or one that it may share"
for_two = pytest.mark.skipif(not ENOUGH, reason=_reason)
#: tests that run on emulated devices where there is no GPU
or_emulated = pytest.mark.skipif(HERE and not ENOUGH, reason=_reason)


def take(rank: int) -> torch.device:
    """A rank's GPU, which becomes the current device."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
