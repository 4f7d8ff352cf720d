"""Ranks of test_gpt2.py: two train a GPT-2, compressed on a GPU or the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

import hipress
from bench.gpt2 import GPT2
from tests import gpus
from tests.hipress.common import digest


def on_gpus(rank, size, name):
    """Digests of GPT-2 small on GPUs: compressed there, by each transport, and by the CPU."""
    torch.use_deterministic_algorithms(True)
    device = gpus.take(rank)
    dist.barrier()
    found = []
    for transport in ("host", "staged", *(["nccl"] if gpus.ENOUGH else [])):
        torch.manual_seed(0)
        model = hipress.wrap(GPT2().to(device), name, transport=transport, timeout=120)
        train(model, rank, device)
        found.append(digest(model))
        hipress.detach(model)
        del model
        torch.cuda.empty_cache()
    return tuple(found)


def train(model, rank, device):
    """Twenty steps of AdamW; batches differ by rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        generator = torch.Generator().manual_seed(100 * rank + step)
        tokens = torch.randint(50257, (2, 128), generator=generator).to(device)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
