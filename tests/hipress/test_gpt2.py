"""Twenty steps of a GPT-2 on two ranks: with the kernels of a device the bits are the CPU's."""

import pytest
import torch

from tests.hipress import gpt2_ranks
from tests.hipress.launch import launch

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("name", gpt2_ranks.CODECS)
def test_gpt2_on_an_emulated_device_has_the_bits_of_the_cpu(name):
    found = launch(gpt2_ranks.emulated, 2, name)
    assert len({digest for digests in found for digest in digests}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", gpt2_ranks.CODECS)
def test_gpt2_on_a_gpu_that_two_ranks_share_has_the_bits_of_the_cpu(name):
    """GPT-2 small, staged, beside gradients that the CPU compresses."""
    found = launch(gpt2_ranks.on_one_gpu, 2, name)
    assert len({digest for digests in found for digest in digests}) == 1
