"""Time of a task besides its codec: python -m bench.tasks

Ranks are processes over gloo on loopback. The codec makes 64 bytes of anything and reads none, so
the time is that of the executor, torch.distributed and TCP. CPU time is that of all of a rank's
threads, the kernel's share included. Medians over the steps. The aim is 50 microseconds a task.
"""

from __future__ import annotations

import resource
import tempfile
import time
from typing import Annotated

import numpy as np
import torch
import typer
from torch.multiprocessing.spawn import start_processes

from casync import Choice, Tensor, Topology, build_program, partition
from casync.codec import Bytes, CodecDefaults, Floats, Ints
from casync.graph.graph import Program
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.transports.distributed import DistributedTransport

STRATEGIES = ("ps", "ring", "exchange")
BUCKETS, TENSORS, ELEMENTS, BYTES = 4, 8, 1024, 64


class Empty(CodecDefaults):
    """A codec whose payloads are zeros and cost nothing."""

    name = digest = "empty"
    fixed = reencodes = fuses = True

    def payload_bytes(self, n: int) -> int:
        """Bytes of a payload."""
        return BYTES

    def encode_batch(self, x: Floats, table: Ints, out: Bytes, at: Ints, **_: object) -> Ints:
        """Lengths of empty payloads."""
        return np.full(len(table), BYTES)

    def decode_batch(self, *_: object, **options: object) -> None:
        """Does nothing."""


CODECS = {"empty": Empty()}


def program_of(strategy: str, rank: int, ranks: int, bucket: int) -> Program:
    """The program of a bucket with a part per tensor."""
    topology, first = Topology.flat(ranks), bucket * TENSORS
    tensors = [
        Tensor(f"t{first + i}", first + i, i * ELEMENTS, ELEMENTS, i * ELEMENTS)
        for i in range(TENSORS)
    ]
    choices = {tensor.name: Choice("empty", strategy) for tensor in tensors}
    parts = partition(tensors, choices, topology, CODECS, batch_bytes=1)
    return build_program(parts, topology, CODECS, rank)


def measure(strategy: str, ranks: int, steps: int) -> str:
    """Runs on every rank; prints a line of results."""
    rank = torch.distributed.get_rank()
    programs = [program_of(strategy, rank, ranks, bucket) for bucket in range(BUCKETS)]
    buckets = [torch.zeros(TENSORS * ELEMENTS) for _ in programs]
    transport = DistributedTransport.connect(60.0)
    with Executor(transport, CODECS, RunOptions(timeout=60.0)) as executor:
        marks = [_used()]
        for step in range(steps):
            torch.futures.wait_all(
                [executor.submit(p, b, {}, step) for p, b in zip(programs, buckets, strict=True)]
            )
            marks.append(_used())
    torch.distributed.barrier()
    transport.close()
    count = sum(len(program.tasks) for program in programs)
    cpu, wall, switches = np.median(np.diff(marks, axis=0), axis=0)
    each = f"{1e6 * cpu / count:4.0f} us of CPU a task, {switches / count:4.2f} wake-ups a task"
    return f"{strategy:10} {count:4} tasks, {each}, {1e3 * wall:6.2f} ms a step"


def _used() -> tuple[float, float, int]:
    """CPU time, time, and number of times that a thread gave up its core to wait, all so far."""
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    return time.process_time(), time.perf_counter(), switches


def work(rank: int, store: str, ranks: int, steps: int) -> None:
    """Run a rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    for strategy in STRATEGIES:
        line = measure(strategy, ranks, steps)
        if rank == 0:
            print(line, flush=True)
    torch.distributed.destroy_process_group()


def main(
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
) -> None:
    """Print a line per strategy."""
    print(f"{ranks} ranks, {BUCKETS} buckets of {TENSORS} parts, {steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (f"{folder}/store", ranks, steps), ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    typer.run(main)
