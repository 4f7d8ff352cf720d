"""Bytes that a rank sends in a step, by strategy and world size: python -m bench.volumes

A tensor of four million elements, topk at 1%, over the memory transport, so counted and not
estimated. Gradients of ranks are half alike, as those of a model are, and half their own.
"""

from __future__ import annotations

import torch
import typer

from casync.building.parts import Choice, Tensor
from casync.codec import Codec
from casync.graph.graph import build_program
from casync.graph.plan import partition
from casync.runtime.executor import Executor
from casync.testing import Hub
from casync.topology import Topology
from hipress.plan.codecs import compile_codec

ELEMENTS, RATIO, WORLDS = 1 << 22, 0.01, (2, 4, 8)
STRATEGIES = ("allgather", "ps", "gtopk", "oktopk")


def sent(strategy: str, world_size: int, codecs: dict[str, Codec]) -> list[int]:
    """Bytes that each rank sends."""
    topology = Topology.flat(world_size)
    choices = {"t": Choice("topk", strategy)}
    parts = partition([Tensor("t", 0, 0, ELEMENTS, 0)], choices, topology, codecs)
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(ELEMENTS, generator=generator)
    executors = [Executor(end, codecs) for end in Hub(world_size).endpoints()]
    try:
        futures = [
            executor.submit(
                build_program(parts, topology, codecs, rank),
                common + torch.randn(ELEMENTS, generator=generator),
                {},
                0,
            )
            for rank, executor in enumerate(executors)
        ]
        torch.futures.wait_all(futures)
        return [executor.counters.bytes_sent for executor in executors]
    finally:
        for executor in executors:
            executor.close()


def main() -> None:
    """Print a line per strategy: megabytes of the mean rank, and of the rank that sends most."""
    codecs: dict[str, Codec] = {"topk": compile_codec("topk", {"ratio": RATIO})}
    for strategy in STRATEGIES:
        cells = []
        for world_size in WORLDS:
            found = sent(strategy, world_size, codecs)
            mean, most = sum(found) / world_size / 1e6, max(found) / 1e6
            cells.append(f"{world_size} ranks {mean:5.2f} MB, at most {most:5.2f}")
        print(f"{strategy:10}", "; ".join(cells))


if __name__ == "__main__":
    typer.run(main)
