"""GPUs of tests marked `gpu`: one, or with two ranks one each, or one for both, which NCCL allows
from 2.30 on.

    @pytest.mark.gpu                             # skipped without a GPU
    @pytest.mark.gpu(ranks=2)                    # without two, or one that NCCL may share
    @pytest.mark.gpu(ranks=2, emulated=True)     # runs on emulated devices where there is no GPU

Ranks share a GPU if NCCL_MULTI_RANK_GPU_ENABLE=1; libnccl 2.30 or later must then be loaded, and
NCCL_MAX_CTAS=4 leaves room for both.
"""

import os

import torch

HERE = torch.cuda.is_available()
SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
ENOUGH = torch.cuda.device_count() > (0 if SHARED else 1)


def lacking(ranks: int = 1, *, emulated: bool = False) -> str:
    """The reason to skip a test with this mark here; empty if it runs."""
    if emulated and not HERE:
        return ""
    if ranks > 1 and not ENOUGH:
        return "NCCL needs two GPUs, or one that it may share"
    return "" if HERE else "no GPU"


def take(rank: int) -> torch.device:
    """A rank's GPU, which becomes the current device."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
