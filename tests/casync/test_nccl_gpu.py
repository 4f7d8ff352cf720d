"""NCCL itself, on two GPUs: each binding, captured and not."""

import pytest
import torch

from casync.nccl.bindings import BINDINGS
from tests.casync import nccl_ranks
from tests.hipress.launch import launch


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("binding", BINDINGS)
def test_gpu_ranks_agree(binding, capture):
    launch(nccl_ranks.averages, 2, binding, capture)
