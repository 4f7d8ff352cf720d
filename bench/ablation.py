"""Time to synchronize a model's gradients while the engine's parts are switched on one by one.

    python -m bench.netns run --hosts 4 --rate 1gbit -- python -m bench.ablation

Every host is a rank. All gradients are ready at the beginning, and nothing else is computed. The
model is a transformer of 192 tensors (14.8 million elements); codec `int4_group`, strategy `ps`.

- `naive`: each tensor goes whole to one owner, and the next one starts when it is back;
- `pipeline`: tensors are cut for all owners and all are under way together; each chunk is a message
  and each task a call;
- `bulk`: one message per owner and bucket, and shared calls;
- `plan`: other strategies, and messages that close later or earlier.

Variants take turns; rank 0 prints medians and quartiles, as text and as JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from casync.building.parts import Choice, Tensor
from casync.graph.graph import Program, build_program
from casync.graph.plan import partition
from casync.graph.shares import Shares, share_out
from casync.memory.host import HostMemory
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.topology import Topology
from casync.transports.distributed import DistributedTransport
from hipress.codecs import compile_codec, state_of

WIDTH, LAYERS, ROUNDS, WARM_UP = 320, 12, 21, 3
BUCKET = 25 << 20  # bytes
CODEC = "int4_group"
CODECS = {CODEC: compile_codec(CODEC, {})}
#: strategy, MB of gradient at which a message closes
PLANS = (("ps", 1), ("ps", 16), ("ring", 4), ("exchange", 4))
SMALL = 64 << 10  # bytes of a chunk: where messages were cut without bulk


def sizes() -> list[int]:
    """The parameters' numbers of elements, in order."""
    square, few = WIDTH * WIDTH, WIDTH
    block = [square, few] * 4 + [few] * 4 + [4 * square, 4 * few, 4 * square, few]
    return block * LAYERS


def _tensors(lengths: Sequence[int], first: int = 0) -> list[Tensor]:
    starts = accumulate(lengths, initial=0)
    return [
        Tensor(f"t{i}", i, start, n, 0)
        for i, (n, start) in enumerate(zip(lengths, starts, strict=False), first)
    ]


def _program(
    tensors: Sequence[Tensor], shares: dict[str, Shares], strategy: str, batch: int, cut: int = 1
) -> Program:
    topology = Topology.flat(dist.get_world_size())
    choices = {tensor.name: Choice(CODEC, strategy, cut) for tensor in tensors}
    parts = partition(
        tensors, choices, topology, CODECS, shares=shares, batch_bytes=batch, least_bytes=SMALL
    )
    return build_program(parts, topology, CODECS, dist.get_rank())


def _buckets() -> Iterator[list[Tensor]]:
    some: list[int] = []
    first = 0
    for n in sizes():
        some.append(n)
        if 4 * sum(some) >= BUCKET:
            yield _tensors(some, first)
            first, some = first + len(some), []
    if some:
        yield _tensors(some, first)


@dataclass(frozen=True)
class Way:
    """Programs to submit, and the way to submit them."""

    programs: Sequence[Program]
    waits: bool = False  # True: wait for each before the next
    bulk: bool = True  # True: tasks share calls


def ways() -> dict[str, Way]:
    """All ways by name."""
    ranks, tensors = dist.get_world_size(), _tensors(sizes())
    whole: dict[str, Shares] = {t.name: ((0, t.index % ranks),) for t in tensors}
    shares = {t.name: each for t, each in zip(tensors, share_out(sizes(), ranks), strict=True)}
    alone, every = [_moved(tensor) for tensor in tensors], list(_buckets())
    by_name = {
        "naive": Way([_program(some, whole, "ps", 1) for some in alone], waits=True, bulk=False),
        "pipeline": Way([_program(some, {}, "ps", 1) for some in every], bulk=False),
        "bulk": Way([_program(some, shares, "ps", 4 << 20) for some in every]),
    }
    for strategy, batch in PLANS:
        programs = [_program(some, shares, strategy, batch << 20) for some in every]
        by_name[f"plan: {strategy}, {batch} MB"] = Way(programs)
    return by_name


def _moved(tensor: Tensor) -> list[Tensor]:
    """The tensor, moved to the beginning of a bucket of its own."""
    return [Tensor(tensor.name, tensor.index, 0, tensor.length, 0)]


def _seconds(executor: Executor, way: Way, step: int) -> float:
    lengths = [max(r[0] + r[1] for part in p.parts for r in part.rows) for p in way.programs]
    buckets, codec = [torch.randn(n) for n in lengths], CODECS[CODEC]
    states = {
        (CODEC, side): state_of(codec, HostMemory(), max(lengths))
        for side in ("worker", "aggregator")
    }
    dist.barrier()
    begin = time.perf_counter()
    futures = []
    for program, bucket in zip(way.programs, buckets, strict=True):
        futures.append(executor.submit(program, bucket, states, step))
        if way.waits:
            futures[-1].wait()
    torch.futures.wait_all(futures)
    return time.perf_counter() - begin


def main(
    output: Annotated[Path | None, typer.Option(help="folder of the JSON file and chart")] = None,
) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    every, times = ways(), dict[str, list[float]]()
    with ExitStack() as stack:
        executors = {
            bulk: stack.enter_context(
                Executor(
                    DistributedTransport.connect(60.0),
                    CODECS,
                    RunOptions(timeout=60.0, bulk=bulk, owns=True),
                )
            )
            for bulk in (False, True)
        }  # fmt: skip
        for step in range(WARM_UP + ROUNDS):
            for name, way in every.items():
                seconds = _seconds(executors[way.bulk], way, step)
                times.setdefault(name, []).append(seconds)
        dist.barrier()
    if dist.get_rank() == 0:
        _tell(times, every, output)
    dist.destroy_process_group()


def _tell(
    times: Mapping[str, Sequence[float]], every: Mapping[str, Way], output: Path | None
) -> None:
    rows: dict[str, Any] = {}
    for name, seconds in times.items():
        low, middle, high = (1e3 * t for t in statistics.quantiles(seconds[WARM_UP:], n=4))
        tasks = sum(len(program.tasks) for program in every[name].programs)
        rows[name] = {"ms": [round(t, 1) for t in (low, middle, high)], "tasks": tasks}
        print(f"{name:24} {middle:7.1f} ms ({low:.1f} to {high:.1f}), {tasks} tasks", flush=True)
    text = json.dumps({"ranks": dist.get_world_size(), "rows": rows})
    print(text, flush=True)
    if output is not None:
        (output / "ablation.json").write_text(text + "\n")
        draw({name: row["ms"] for name, row in rows.items()}, output / "ablation.png")


def draw(quartiles: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw a bar for each way: the median in milliseconds, and the quartiles as whiskers."""
    from hipress.tools.charts import INK, png, style

    figure = png((8, 3.2))
    axes, names = figure.subplots(), [*quartiles]
    style(axes)
    low, middle, high = ([quartiles[name][k] for name in names] for k in range(3))
    spread = [[m - a for m, a in zip(middle, low, strict=True)],
              [b - m for b, m in zip(high, middle, strict=True)]]  # fmt: skip
    bars = axes.barh(names, middle, xerr=spread, color="#2e9e6b", ecolor=INK, capsize=3)
    axes.bar_label(bars, [f"{m:.0f} ms" for m in middle], padding=8)
    axes.set_xlabel("ms until all gradients are averaged")
    axes.margins(x=0.14)
    axes.invert_yaxis()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
