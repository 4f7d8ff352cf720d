"""Twenty steps of a GPT-2 on two ranks: a device's kernels give the same bits as the CPU's."""

import pytest

from tests.hipress import gpt2_ranks
from tests.hipress.launch import launch


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4_group", "onebit_group", "topk", "powersgd"])
def test_gpt2_on_gpus_has_the_bits_of_the_cpu(name):
    """GPT-2 small: gradients that the CPU compresses, and the GPU, staged and over NCCL."""
    found = launch(gpt2_ranks.on_gpus, 2, name)
    assert len({digest for digests in found for digest in digests}) == 1
