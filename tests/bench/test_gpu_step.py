"""The benchmark of a step, on the CPU with a small model."""

import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench import absent, gpu_step
from bench.gpt2 import GPT2
from casync.transports import nccl
from tests.hipress.device_training_ranks import on_device


class Tiny(nn.Module):
    """A model with the arguments of a language model of transformers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})


def test_a_step_of_one_of_eight_ranks_is_timed_by_wrap(monkeypatch):
    """On an emulated device; the seven other ranks are absent, and nothing waits for them."""
    monkeypatch.setattr(nccl, "_current_stream", lambda: 0)
    tokens, groups = torch.randint(50, (2, 8)), []
    monkeypatch.setattr(absent, "nullcontext", lambda: groups.append(1) or nullcontext())
    torch.manual_seed(0)
    with on_device(0, transport="nccl4py", connected=False) as codec:
        codecs = {"int8_group": codec("int8_group")}
        found = list(gpu_step.rows(Tiny, tokens, codecs, 2, ranks=8, captures=[False]))
    assert [(row["codec"], row["ranks"]) for row in found] == [("ddp", 8), ("int8_group", 8)]
    assert all(0 < row["host_ms"] <= row["ms"] for row in found)
    assert groups, "NCCL's stand-in was called"
    assert "nccl.core" not in sys.modules
    assert not dist.is_initialized()


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
