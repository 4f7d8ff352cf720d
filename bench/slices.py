"""Time and memory of a rank's own slice of a graph: python -m bench.slices

1024 ranks in nodes of 8, 100 tensors of a million elements, int4_group's payloads. The aim is 1 s
and 200 MB; allgather, with N-1 messages per tensor, does not suit this number of ranks.
"""

from __future__ import annotations

import time
import tracemalloc

import typer

from casync.building.parts import Choice, Tensor
from casync.graph.graph import Program, build_program
from casync.graph.plan import partition
from casync.topology import Topology
from hipress.plan.codecs import compile_codec

RANKS, PER_NODE, TENSORS, ELEMENTS = 1024, 8, 100, 10**6
STRATEGIES = ("ps", "ring", "hierarchical", "gtopk", "oktopk", "allgather")


def own_slice(strategy: str) -> Program:
    """The program of one rank."""
    codecs = {"int4_group": compile_codec("int4_group", {})}
    topology, starts = Topology.even(RANKS, PER_NODE), [i * ELEMENTS for i in range(TENSORS)]
    tensors = [Tensor(f"t{i}", i, start, ELEMENTS, start) for i, start in enumerate(starts)]
    choices = {tensor.name: Choice("int4_group", strategy) for tensor in tensors}
    parts = partition(tensors, choices, topology, codecs)
    return build_program(parts, topology, codecs, rank=17)


def main() -> None:
    """Print a line per strategy."""
    print(f"{RANKS} ranks, {TENSORS} tensors of {ELEMENTS} elements")
    for strategy in STRATEGIES:
        begin = time.process_time()
        program = own_slice(strategy)
        seconds = time.process_time() - begin
        tracemalloc.start()
        own_slice(strategy)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        sizes = f"{len(program.parts)} parts, {len(program.tasks)} tasks"
        print(f"{strategy:12} {seconds:5.2f} s of CPU, {peak:4.0f} MB: {sizes}")


if __name__ == "__main__":
    typer.run(main)
