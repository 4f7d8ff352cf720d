"""The benchmark of a step, on the CPU with a small model."""

import pytest
import torch
from torch import nn

import compll
from bench import gpu_step
from bench.gpt2 import GPT2
from casync.memory.host import HostMemory
from tests.hipress.launch import launch


class Tiny(nn.Module):
    """A model with the arguments of a language model of transformers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})


def steps(rank, size):
    torch.manual_seed(0)
    codecs = {"int8_group": compll.compile("int8_group", "cpu")}
    tokens = torch.randint(50, (2, 8))
    torch.distributed.destroy_process_group()
    with gpu_step.alone("gloo"):
        return list(gpu_step.rows(Tiny, tokens, codecs, HostMemory(), 2, captures=(False,)))


def test_a_step_is_timed_without_and_with_each_codec():
    (found,) = launch(steps, 1)
    assert [(row["codec"], row["captured"]) for row in found] == [
        ("ddp", False),
        ("int8_group", False),
    ]
    assert all(0 < row["host_ms"] <= row["ms"] for row in found)


def test_without_a_gpu_that_is_said(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(gpu_step.typer.Exit):
        gpu_step.main()
    assert "no CUDA device" in capsys.readouterr().err


def test_gpt2_small_has_the_parameters_of_transformers():
    with torch.device("meta"):
        model = GPT2()
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert len(list(model.parameters())) == 148
    loss = GPT2(2, 64, 2, 211, 32)(*2 * (torch.randint(211, (2, 16)),)).loss
    assert 5.0 < float(loss.detach()) < 5.7  # ln(211) = 5.35
