"""A training step of GPT-2 small on one rank of two, with all but the wire, and DDP's own.

    python -m bench.gpu_step [int4_group topk] [--ranks 2,8] [--batch 8] [--length 512]

Needs a GPU and CuPy. A step is forward and backward pass under bfloat16 autocast, and AdamW's. No
other ranks exist: received messages are whatever lies in memory, so compressors have payloads of
fixed lengths; the host's work is that of the given number of ranks. `ddp` is torch's DDP on one
rank, whose all-reduce has nothing to do. Results: gpu_step.json.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.commands import RESULTS, given, refusing
from bench.gpt2 import GPT2
from bench.gpu_times import require_gpu
from casync.building.parts import Choice, Tensor
from casync.codec import Codec
from casync.graph.graph import Program, build_program
from casync.graph.plan import partition
from casync.memory import Memory
from casync.memory.device import DeviceMemory
from casync.runtime.executor import Executor
from casync.topology import Topology
from casync.transports import Transfer
from hipress.compat import GradBucket
from hipress.demo.command import check_output
from hipress.plan.codecs import compile_codec

WARM = 4  # steps: DDP makes new buckets after the first, programs are captured in the third
STRATEGY = "ps"


class NoWire:
    """An endpoint where nothing travels; see casync.transports.SlotTransport."""

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.world_size = ranks

    def exchange(self, transfers: Sequence[Transfer]) -> None:
        """Leave received messages as they were (SlotTransport)."""

    def abort(self) -> None:
        """Nothing to abort."""

    def close(self) -> None:
        """Nothing to close."""


class Hook:
    """Synchronizes DDP's buckets by a codec."""

    def __init__(
        self, model: nn.Module, codec: Codec, memory: Memory, ranks: int, *, capture: bool
    ) -> None:
        named = [p for p in model.parameters() if p.requires_grad]
        self._places = {id(p): (i, sum(q.numel() for q in named[:i])) for i, p in enumerate(named)}
        total = sum(p.numel() for p in named)
        sides = ("worker", "aggregator") if codec.stateful else ()
        self._codecs = {codec.name: codec}
        self._states = {(codec.name, side): codec.init_state(total, len(named)) for side in sides}
        self._flat = Topology.flat(ranks)
        self.executor = Executor(NoWire(ranks), self._codecs, memory=memory, capture=capture)
        self._programs: dict[tuple[int, ...], Program] = {}
        self.step = 0

    def program(self, parameters: Sequence[torch.Tensor]) -> Program:
        """The workload of a bucket of these parameters."""
        key = tuple(self._places[id(p)][0] for p in parameters)
        if key not in self._programs:
            starts = [sum(q.numel() for q in parameters[:i]) for i in range(len(parameters))]
            tensors = [
                Tensor(str(index), index, start, p.numel(), place)
                for start, p in zip(starts, parameters, strict=True)
                for index, place in [self._places[id(p)]]
            ]
            (name,) = self._codecs
            choices = {tensor.name: Choice(name, STRATEGY) for tensor in tensors}
            parts = partition(tensors, choices, self._flat, self._codecs)
            self._programs[key] = build_program(parts, self._flat, self._codecs, 0, rotates=False)
        return self._programs[key]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The average of a bucket."""
        program = self.program(bucket.parameters())
        return self.executor.submit(program, bucket.buffer(), self._states, self.step)


def install(ddp: DistributedDataParallel, hook: Hook) -> None:
    """Register the hook through a function, since DDP inspects its signature."""

    def reduce(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook.reduce(bucket)

    ddp.register_comm_hook(None, reduce)


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """A process group of one rank."""
    with TemporaryDirectory() as folder:
        where = Path(folder, "store").as_uri()
        dist.init_process_group(backend, init_method=where, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def measure(
    model: nn.Module, tokens: torch.Tensor, hook: Hook | None, repeat: int
) -> tuple[float, float]:
    """Median milliseconds of a step, and of the host's part of it."""
    ddp = DistributedDataParallel(model)
    if hook is not None:
        install(ddp, hook)
    wait: Callable[[], None] = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole, host = [], []
    for number in range(WARM + repeat):
        ddp.zero_grad(set_to_none=False)
        wait()
        begin = perf_counter()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            loss = ddp(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if hook is not None:
            hook.executor.settle()  # as wrap does at the end of a backward pass
        optimizer.step()
        host.append(1e3 * (perf_counter() - begin))
        wait()
        whole.append(1e3 * (perf_counter() - begin))
        if hook is not None:
            hook.step = number + 1
    return statistics.median(whole[WARM:]), statistics.median(host[WARM:])


def rows(
    make: Callable[[], nn.Module],
    tokens: torch.Tensor,
    codecs: Mapping[str, Codec],
    memory: Memory,
    repeat: int,
    *,
    ranks: Sequence[int] = (2,),
    captures: Sequence[bool] = (False, True),
) -> Iterator[dict[str, Any]]:
    """Rows of DDP and of each codec by ranks, not captured and captured."""
    ways = [(name, size, capture) for name in codecs for size in ranks for capture in captures]
    for name, size, capture in [("ddp", 1, False), *ways]:
        model = make()
        hook = Hook(model, codecs[name], memory, size, capture=capture) if size > 1 else None
        ms, host = measure(model, tokens, hook, repeat)
        if hook is not None:
            hook.executor.close()
        which = {"codec": name, "ranks": size, "captured": capture}
        yield which | {"ms": round(ms, 3), "host_ms": round(host, 3)}


def _gpt2(device: torch.device) -> nn.Module:
    """Small, with random weights."""
    return GPT2().to(device)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="compressors of fixed lengths")] = None,
    ranks: Annotated[str, typer.Option(help="ranks, of which one runs")] = "2",
    batch: Annotated[int, typer.Option(help="sequences of a step", min=1)] = 8,
    length: Annotated[int, typer.Option(help="tokens of a sequence", min=2)] = 512,
    repeat: Annotated[int, typer.Option(help="timed steps; the median counts", min=1)] = 21,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """A step of GPT-2 small."""
    with refusing():
        require_gpu()
        check_output(output)
        sizes = [int(size) for size in ranks.split(",")]
    device = torch.device("cuda", torch.cuda.current_device())
    codecs = {name: compile_codec(name, {}, "cuda") for name in names or ["int4_group", "topk"]}
    tokens = torch.randint(50257, (batch, length), device=device)
    with alone("nccl"):
        found = []
        memory = DeviceMemory(device)
        for row in rows(partial(_gpt2, device), tokens, codecs, memory, repeat, ranks=sizes):
            found.append(row)
            typer.echo(json.dumps(row))
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
             "date": date.today().isoformat(), "command": given("bench.gpu_step"),
             "ranks": sizes, "batch": batch, "length": length, "repeat": repeat}  # fmt: skip
    text = json.dumps({**about, "rows": found}, indent=1) + "\n"
    (output / "gpu_step.json").write_text(text)


if __name__ == "__main__":
    typer.run(main)
