"""NCCL itself, between two ranks: each binding, captured and not; its calls over gloo, too."""

import pytest

from casync.nccl.bindings import BINDINGS
from tests.casync import nccl_ranks
from tests.hipress.launch import launch


@pytest.mark.gpu(ranks=2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pynccl imports numba's CUDA part
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("binding", BINDINGS)
def test_gpu_ranks_have_the_averages_of_the_cpu(binding, capture):
    launch(nccl_ranks.averages, 2, binding, capture)


@pytest.mark.slow
def test_the_same_ranks_without_a_device():
    launch(nccl_ranks.averages, 2, None, False)
