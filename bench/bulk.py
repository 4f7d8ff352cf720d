"""Costs of a large model's step besides its bytes: python -m bench.bulk

Counts tasks of one rank, calls of codecs, messages and groups of a step without tags (NCCL), with
DDP's buckets and `int4_group`; nothing is run. It counts those of the graph, and those of its
program on a device, where tasks share calls. The rank is one in the middle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import typer
from torch import nn

from casync.building.parts import Choice, Part, Tensor
from casync.building.tasks import Recv, Reduce, Send, Task
from casync.codec import FLOAT_BYTES
from casync.cost import CodecCost, Costs, Line, Transfer
from casync.graph.graph import Program, build_program
from casync.graph.joining import Bulk, join_tasks
from casync.graph.plan import partition
from casync.graph.shares import share_out
from casync.raw import with_raw
from casync.stages import TASK
from casync.topology import Topology
from hipress.choose.search import Way
from hipress.choose.workload import ddp_buckets, timed
from hipress.codecs import compile_codec, partitions
from hipress.model.params import describe
from hipress.tools.objective import Objective

CODEC = "int4_group"
CODECS = with_raw({CODEC: compile_codec(CODEC, {})})
WORLDS = ((8, 1, "ps"), (16, 1, "ps"), (128, 8, "hierarchical"), (1024, 8, "hierarchical"))


def bert_large() -> list[int]:
    """The parameters' numbers of elements, in order."""
    block = [1024 * 1024, 1024] * 4 + [1024] * 2 + [1024 * 4096, 4096, 4096 * 1024] + [1024] * 3
    return [30522 * 1024, 512 * 1024, 2048, 1024, 1024, *(block * 24), 1024 * 1024, 1024]


def gpt2(layers: int = 12, width: int = 768) -> list[int]:
    """Numbers of elements of GPT-2 small; of xl with 48 layers of 1600."""
    square, few = width * width, width
    block = [few, few, 3 * square, 3 * few, square, few, few, few]
    block += [4 * square, 4 * few, 4 * square, few]
    return [50257 * width, 1024 * width, *(block * layers), few, few]


def buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of parameters by bucket, as in DDP's buckets after the first step."""
    for positions in ddp_buckets([FLOAT_BYTES * size for size in reversed(sizes)]):
        yield [len(sizes) - 1 - position for position in positions]


@dataclass(frozen=True)
class Step:
    """Programs of a rank for all buckets, and all parts."""

    programs: Sequence[Program]
    parts: Sequence[Part]
    topology: Topology

    @property
    def busiest(self) -> float:
        """Ratio of the busiest rank's owned elements to the mean."""
        owned = Counter[int]()
        for part in self.parts:
            owned[part.owner] += part.elements
        return max(owned.values()) * self.topology.world_size / owned.total()


def step_of(sizes: Sequence[int], topology: Topology, strategy: str) -> Step:
    """The programs of a step of a model."""
    n, rank = topology.world_size, topology.world_size // 2 + 1
    shares = {str(i): each for i, each in enumerate(share_out(sizes, n))}
    programs, every = list[Program](), list[Part]()
    for bucket in buckets(sizes):
        starts = [sum(sizes[i] for i in bucket[:k]) for k in range(len(bucket))]
        tensors = [Tensor(str(i), i, at, sizes[i], 0) for i, at in zip(bucket, starts, strict=True)]
        cuts = {i: partitions(sizes[i], CODECS[CODEC], strategy, n) for i in bucket}
        choices = {str(i): Choice(CODEC, strategy, cut) for i, cut in cuts.items()}
        parts = partition(tensors, choices, topology, CODECS, shares=shares)
        programs.append(build_program(parts, topology, CODECS, rank % n, rotates=False))
        every += parts
    return Step(programs, every, topology)


def _describe(tasks: Sequence[Sequence[Task]]) -> str:
    every = [task for some in tasks for task in some]
    moved = [task for task in every if isinstance(task, Send | Recv | Reduce)]
    groups = sum(
        len({t.slot for t in some if isinstance(t, Send | Recv | Reduce)}) for some in tasks
    )
    calls = len(every) - len(moved)
    return f"{len(every):6} tasks, {calls:5} calls, {len(moved):6} messages, {groups:5} groups"


def predict(sizes: Sequence[int], topology: Topology, strategy: str, *, free: bool) -> float:
    """Seconds of a step whose backward pass takes 90 ms.

    GPUs on NVLink, 12.5 GB/s per rank between nodes, codecs that take 5 microseconds and 200 GB/s.
    free: without the fixed costs of calls and messages.
    """
    params = describe(nn.ParameterList(nn.Parameter(torch.empty(n, device="meta")) for n in sizes))
    once = 0.0 if free else 5e-6
    line = Line(once - (TASK if free else 0.0), 1 / 2e11)
    link = Transfer(Line(0.0 if free else 5e-5, 1 / 12.5e9))
    inside = Transfer(Line(0.0 if free else 1e-5, 1 / 1e11))
    costs = Costs(
        {topology.world_size - 1: link}, {"float32": link},
        {CODEC: CodecCost(line, line, line)}, inside, overlap=1.0,
    )  # fmt: skip
    every = [(param,) for param in params]
    order = params[::-1]
    passed = list(accumulate(param.numel for param in order))
    workload = timed(order, [0.09 * done / passed[-1] for done in passed], 0.0)
    objective = Objective(every, CODECS, topology, costs, workload)
    return objective.step([Way(CODEC, strategy)] * len(every)).seconds


def main() -> None:
    """Print three lines per model and world."""
    device = Bulk(math.inf, at_once=True)
    for name, sizes in (("BERT-large", bert_large()), ("GPT-2 small", gpt2())):
        for n, per_node, strategy in WORLDS:
            step = step_of(sizes, Topology.even(n, per_node), strategy)
            programs = [join_tasks(program, CODECS, device) for program in step.programs]
            count = f"{len(programs)} buckets, {len(step.parts)} parts"
            print(f"{name}, {n} ranks, {strategy}: {count}, busiest owner {step.busiest:.2f}")
            print("  graph ", _describe([program.tasks for program in step.programs]))
            print("  joined", _describe([program.tasks for program in programs]))
            arguments = sizes, step.topology, strategy
            whole, free = (1e3 * predict(*arguments, free=free) for free in (False, True))
            print(f"  predicted {whole:.1f} ms, {free:.1f} if these were free", flush=True)


if __name__ == "__main__":
    typer.run(main)
