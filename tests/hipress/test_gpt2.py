"""Twenty steps of a GPT-2 on two ranks: a device's kernels give the same bits as the CPU's."""

import pytest

from tests.hipress import gpt2_ranks
from tests.hipress.launch import launch


@pytest.mark.slow
@pytest.mark.parametrize("name", gpt2_ranks.CODECS)
def test_gpt2_on_an_emulated_device_has_the_bits_of_the_cpu(name):
    found = launch(gpt2_ranks.emulated, 2, name)
    assert len({digest for digests in found for digest in digests}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpt2_ranks.ON_GPUS)
def test_gpt2_on_gpus_has_the_bits_of_the_cpu(name):
    """GPT-2 small: gradients that the CPU compresses, and the GPU, staged and over NCCL."""
    found = launch(gpt2_ranks.on_gpus, 2, name)
    assert len({digest for digests in found for digest in digests}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name, bits", [("int8_group", 8.25), ("int4_group", 4.25)])
def test_a_node_without_nvlink_on_two_emulated_gpus(name, bits):
    """Embeddings (one is the head), biases and norms travel uncompressed; the rest takes a
    payload's bytes. All bits are the CPU's."""
    found = launch(gpt2_ranks.node, 2, name)
    (digest,) = {told for pair in found for told, *_ in pair}
    assert digest
    for there, here in found:
        assert there[1:] == here[1:]
        decided, sent = there[1:]
        exempt = {one for one, codec in decided.items() if codec is None}
        assert exempt == {one for one in decided if not one.endswith((".c_attn.weight",
            ".c_proj.weight", ".c_fc.weight"))}  # fmt: skip
        assert {codec for codec in decided.values() if codec} == {name}
    sizes = {n: p.numel() for n, p in gpt2_ranks.made("cpu", True).named_parameters()}
    left, rest = (sum(size for one, size in sizes.items() if (one in exempt) == same)
                  for same in (True, False))  # fmt: skip
    # of two ranks each sends half of the sums, and half of the averages
    assert sent == pytest.approx(4 * left + rest * bits / 8, rel=0.02)
