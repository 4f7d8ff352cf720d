"""Ranks of test_processes.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import compll
from casync.building.tasks import SIDES
from casync.errors import CasyncError
from casync.memory.host import HostMemory
from casync.nccl.distributed import connector
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.transports.distributed import DistributedTransport
from casync.transports.nccl import NcclTransport
from tests.casync.emulated import DeviceMemory, compiled
from tests.casync.fakes import (
    CODECS,
    MEANS,
    SIZES,
    Sparse,
    gradients,
    graph_of,
    jitter,
    replay,
    states_of,
)
from tests.casync.streams import Schedule
from tests.patience import HANG

TOTAL = sum(SIZES)
#: executors whose connections last until all ranks end together
LASTING: list[Executor] = []


def same_everywhere(bucket):
    """True if all ranks hold the same bits."""
    others = [torch.empty_like(bucket) for _ in range(dist.get_world_size())]
    dist.all_gather(others, bucket)
    return all(torch.equal(other.view(torch.int32), bucket.view(torch.int32)) for other in others)


def exchange(rank, size):
    """All strategies at once, two steps; compares each result with the mean."""
    transport = DistributedTransport.connect(HANG)
    graphs = [graph_of(SIZES, strategy, codec, size) for strategy, codec in MEANS]
    programs = [graph.slice(rank) for graph in graphs]
    states = [states_of(TOTAL) for _ in graphs]
    with Executor(transport, CODECS, RunOptions(timeout=HANG, delay=jitter(rank))) as executor:
        for step in range(2):
            inputs = [gradients(TOTAL, size, seed=100 * step + i) for i in range(len(graphs))]
            buckets = [given[rank].clone() for given in inputs]
            futures = [
                executor.submit(p, b, s, step)
                for p, b, s in zip(programs, buckets, states, strict=True)
            ]
            torch.futures.wait_all(futures)
            for (strategy, codec), bucket, given in zip(MEANS, buckets, inputs, strict=True):
                assert same_everywhere(bucket), (strategy, codec)
                tolerance = {"half": 4e-3, "sign": 9.0}.get(codec, 1e-6)
                mean = torch.stack(given).mean(0)
                torch.testing.assert_close(bucket, mean, rtol=tolerance, atol=tolerance)
        assert executor.counters.jobs == 2 * len(MEANS)
    dist.barrier()
    transport.close()


def staged(rank, size):
    """Emulated device memory over gloo: the same averages as on ranks with host memory."""
    codec, own = compll.compile("onebit_group"), compiled("onebit_group")
    program = graph_of((33, 3000), "ps", "c", size, codecs={"c": codec}).slice(rank)
    schedule = Schedule(rank)
    memory, transports = DeviceMemory(schedule), [DistributedTransport.connect(HANG) for _ in "ab"]
    with (
        schedule.driving(),
        Executor(transports[0], {"c": own}, RunOptions(timeout=HANG), memory=memory) as device,
        Executor(transports[1], {"c": codec}, RunOptions(timeout=HANG)) as host,
    ):
        state = codec.init_state(3033)
        theirs = {("c", s): {n: a.copy() for n, a in state.items()} for s in SIDES}
        ours = {k: {n: memory.tensor(a.copy()) for n, a in s.items()} for k, s in theirs.items()}
        for step in range(3):
            values = gradients(3033, size, seed=step)[rank]
            bucket = memory.filled(values)
            device.submit(program, bucket, ours, step).wait()
            host.submit(program, values, theirs, step).wait()
            assert torch.equal(memory.download(bucket), values)
            assert same_everywhere(values)
    dist.barrier()
    for transport in transports:
        transport.close()


def grouped(rank, size):
    """Strategies with messages and reduces among some ranks, through torch's process groups."""
    connect = connector(range(size), HANG, torch.device("cpu"), backend="gloo")
    transport = NcclTransport(connect, rank, size, HostMemory(), HANG, stream=lambda: 0)
    for strategy in ("ps", "hierarchical"):
        program = graph_of(SIZES, strategy, "exact", size).slice(rank)
        given = gradients(TOTAL, size, seed=7)
        bucket = given[rank].clone()
        replay(program, transport, CODECS, bucket)
        assert same_everywhere(bucket)
        torch.testing.assert_close(bucket, torch.stack(given).mean(0))
    dist.barrier()
    transport.close()


def connected_again(rank, size):
    """The names of groups of the same ranks, each made after the one before was closed."""
    connect, names = connector(range(size), HANG, torch.device("cpu"), backend="gloo"), []
    for _ in range(3):
        made = connect(range(size))
        names.append(made._group.group_name)
        dist.barrier()
        made.close()
    return names


def killed(rank, size):
    """The last rank dies between two steps; the others' errors name it."""
    transport = DistributedTransport.connect(HANG)
    program = graph_of([500000], "ps", "exact", size).slice(rank)
    executor = Executor(transport, CODECS, RunOptions(timeout=HANG))
    executor.submit(program, torch.ones(500000), {}, 0).wait()
    if rank == size - 1:
        os._exit(0)
    return error_of(executor, program, torch.ones(500000))


def silent(rank, size):
    """The last rank never submits; the others time out, or learn that one of them did."""
    transport = DistributedTransport.connect(HANG)
    program = graph_of([500000], "ring", "exact", size).slice(rank)
    executor = Executor(transport, CODECS, RunOptions(timeout=0.5))
    if rank < size - 1:
        return error_of(executor, program, torch.ones(500000))
    LASTING.append(executor)
    return None


class Corrupt(Sparse):
    """A codec that encodes an index out of range."""

    def pack(self, x):
        return super().pack(x).replace(b"\0\0\0\0", b"\377" * 4, 1)

    def unpack(self, data, n):
        return torch.zeros(n).numpy()


def corrupt(rank, size):
    """The last rank sends garbage: all ranks end at once, and those that received it name it."""
    transport = DistributedTransport.connect(HANG)
    program = graph_of([5000], "exchange", "sparse", size).slice(rank)
    codecs = {"sparse": Corrupt()} if rank == size - 1 else CODECS
    executor = Executor(transport, codecs, RunOptions(timeout=HANG))
    if rank < size - 1:
        return error_of(executor, program, torch.ones(5000))
    executor.submit(program, torch.ones(5000), {}, 0)
    LASTING.append(executor)
    return None


def error_of(executor, program, bucket):
    """The error of a submit, as text."""
    try:
        executor.submit(program, bucket, {}, 1).wait()
    except CasyncError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        executor.close()
    return "none"
