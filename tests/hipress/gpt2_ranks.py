"""Ranks of test_gpt2.py: two train a GPT-2, compressed on a GPU, an emulated device or the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

import hipress
from bench.gpt2 import GPT2
from tests import gpus
from tests.hipress.common import digest
from tests.hipress.device_training_ranks import on_device

CODECS = ("int4_group", "onebit_group", "topk")
ON_GPUS = (*CODECS, "powersgd")  # the emulated device does not know shapes
STEPS = 20


def made(device, small):
    """A model with random weights, the same on all ranks."""
    torch.manual_seed(0)
    return (GPT2(2, 64, 2, 211, 32) if small else GPT2()).to(device)


def steps(model, rank, vocabulary, count, length):
    """Digest of the parameters after steps of AdamW; batches differ by rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(count):
        generator = torch.Generator().manual_seed(100 * rank + step)
        tokens = torch.randint(vocabulary, (2, length), generator=generator)
        tokens = tokens.to(next(model.parameters()).device)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return digest(model.module)


def emulated(rank, size, name):
    """Digests by the generated kernels on the emulated device, and by the CPU's."""
    small, options = made("cpu", True), {"min_size": 100, "timeout": 120}
    with on_device(rank) as codec:
        model = hipress.wrap(small, codec(name), **options)
        there = steps(model, rank, 211, STEPS, 16)
        hipress.detach(model)
    model = hipress.wrap(made("cpu", True), name, **options)
    here = steps(model, rank, 211, STEPS, 16)
    hipress.detach(model)
    return there, here


def on_gpus(rank, size, name):
    """Digests of GPT-2 small on GPUs: compressed there, by each transport, and by the CPU."""
    torch.use_deterministic_algorithms(True)
    device = gpus.take(rank)
    dist.barrier()
    found = []
    for transport in ("host", "staged", *(["nccl"] if gpus.ENOUGH else [])):
        model = hipress.wrap(made(device, False), name, transport=transport, timeout=120)
        found.append(steps(model, rank, 50257, STEPS, 128))
        hipress.detach(model)
        del model
        torch.cuda.empty_cache()
    return tuple(found)


#: a node without NVLink: parameters that are small, or change in few rows, stay uncompressed
EXEMPT = ("@1d", "@embedding", "@head")


def node(rank, size, name):
    """Digests, decisions and bytes per step without NVLink, on emulated GPUs and on the CPU."""
    with on_device(rank) as codec:
        there = _trained(rank, codec(name))
    return there, _trained(rank, name)


def _trained(rank, compressor):
    model = hipress.wrap(made("cpu", True), compressor, exclude=EXEMPT, min_size=1, timeout=120)
    told = steps(model, rank, 211, 4, 16)
    report = hipress.report(model)
    decided = {one.name: one.codec for one in report.decisions}
    hipress.detach(model)
    return told, decided, report.measured.wire_bytes
