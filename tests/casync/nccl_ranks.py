"""Ranks of test_nccl_gpu.py, each with its own GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

import compll
from casync.memory.device import DeviceMemory
from casync.nccl.bindings import connect_by
from casync.runtime.executor import Executor
from casync.transports.nccl import NcclTransport
from hipress import compat
from tests.casync.fakes import gradients, graph_of
from tests.patience import HANG

LENGTHS = (1000, 70000, 31)
PROGRAMS = (("ps", "int8_group"), ("hierarchical", "onebit_group"), ("allgather", "threshold"))


def averages(rank, size, binding, capture):
    """Averages of five steps of each program are the same on all ranks, and near the mean."""
    device = torch.device("cuda", rank)
    memory, total = DeviceMemory(device), sum(LENGTHS)
    for strategy, name in PROGRAMS:
        with torch.cuda.device(device):
            codec = compll.compile(name, "cuda")
        graph = graph_of(LENGTHS, strategy, name, size, codecs={name: codec})
        store = compat.PrefixStore(f"{strategy}/{binding}/{capture}", compat.job_store())
        connect = connect_by(binding, rank, range(size), device, store, HANG)
        transport = NcclTransport(connect, rank, size, memory, HANG)
        sides = ("worker", "aggregator") if codec.stateful else ()
        states = {(name, side): codec.init_state(total, len(LENGTHS)) for side in sides}
        program = graph.slice(rank)
        with Executor(
            transport, {name: codec}, memory=memory, timeout=HANG, capture=capture, owns=True
        ) as e:
            bucket = torch.empty(total, device=device)
            for step in range(5):
                given = gradients(total, size, seed=step)
                bucket.copy_(given[rank])
                e.submit(program, bucket, states, step).wait()
                e.settle()
                _refuse_difference(bucket.cpu(), given)


def _refuse_difference(bucket, given):
    everybody = [torch.empty_like(bucket) for _ in given]
    dist.all_gather(everybody, bucket)
    assert all(torch.equal(each, bucket) for each in everybody)
    mean = torch.stack(given).mean(0)
    assert float(torch.nn.functional.cosine_similarity(bucket, mean, dim=0)) > 0.5
