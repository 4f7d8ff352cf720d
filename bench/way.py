"""The way of a bucket through the code: python -m bench.way [--names]

Functions of casync and hipress, without comprehensions and codecs, that run in a steady step of a
model of one tensor on two ranks over gloo, by `ps`, in all threads, and their files and calls. What
a reader of a step meets. Ranks meet in a TCP store, as under torchrun.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

import hipress

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("casync", "hipress"))
INLINE = ("comp>", "genexpr>")  # ends of the names of what a reader reads in place
WARM, COUNTED = 6, 4  # steps
SETTLED = 0.2  # seconds in which the last threads of a step end
FEATURES = 512


class Counting:
    """Calls of our functions in all threads that start later, while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[CodeType] = Counter()
        self.threads: set[str] = set()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not self.on or event != "call" or not code.co_filename.startswith(PACKAGES):
            return
        if not code.co_name.endswith(INLINE):
            self.calls[code] += 1
            self.threads.add(threading.current_thread().name)


def model() -> nn.Module:
    """A single tensor."""
    torch.manual_seed(0)
    return nn.Linear(FEATURES, FEATURES, bias=False)


def wrapped(codec: str) -> Callable[[], object]:
    """A step of `wrap`."""
    ddp = hipress.wrap(model(), codec, strategy="ps")
    return lambda: ddp(torch.randn(4, FEATURES)).sum().backward()


def synchronized(codec: str) -> Callable[[], object]:
    """A step of `Synchronizer`."""
    plain = model()
    sync = hipress.Synchronizer(plain, codec, strategy="ps")

    def step() -> None:
        plain(torch.randn(4, FEATURES)).sum().backward()
        sync.step()

    return step


def momentum(codec: str) -> Callable[[], object]:
    """A step of `wrap` with averages of momentum at one bit, and of its optimizer."""
    plain = model()
    optimizer = hipress.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    ddp = hipress.wrap(plain, "onebit_fine", strategy="ps", optimizer=optimizer)

    def step() -> None:
        ddp(torch.randn(4, FEATURES)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(codec: str) -> Callable[[], object]:
    """An all-gather and a reduce-scatter of `shard`."""
    plain = model()
    fully_shard(plain)
    hipress.shard(plain, min_size=0, reduce_scatter=codec)
    return lambda: plain(torch.randn(4, FEATURES)).sum().backward()


def outer(codec: str) -> Callable[[], object]:
    """A round of `Outer`."""
    plain = model()
    loop = hipress.Outer(plain, torch.optim.SGD(plain.parameters()), codec, every=1)
    return loop.step


STEPS: dict[str, Callable[[str], Callable[[], object]]] = {
    "wrap": wrapped,
    "Synchronizer": synchronized,
    "momentum": momentum,
    "shard": sharded,
    "Outer": outer,
}


def count(counting: Counting, step: Callable[[], object]) -> None:
    """Count the calls of a steady step: of COUNTED ones that with the fewest, since a rank that
    waits long also looks into the store."""
    best: Counter[CodeType] = Counter()
    for number in range(WARM + COUNTED):
        dist.barrier()
        counting.calls = Counter()
        counting.on = number >= WARM
        step()
        time.sleep(SETTLED * counting.on)
        counting.on = False
        if number >= WARM and (not best or counting.calls.total() < best.total()):
            best = counting.calls
    counting.calls = best
    dist.barrier()


def line(name: str, counting: Counting) -> str:
    """A row of the table."""
    calls = counting.calls
    files = {code.co_filename for code in calls}
    return (
        f"{name:14}{len(calls):4} functions{len(files):4} files{sum(calls.values()):5} calls"
        f"{len(counting.threads):3} threads"
    )


def names(counting: Counting) -> str:
    """Calls by file and function."""
    codes = sorted((c.co_filename, c.co_firstlineno, c.co_qualname) for c in counting.calls)
    by_code = {(c.co_filename, c.co_firstlineno): n for c, n in counting.calls.items()}
    return "\n".join(
        f"    {by_code[file, first]:3} {Path(file).relative_to(ROOT)}:{first} {name}"
        for file, first, name in codes
    )


def work(rank: int, port: int, codec: str, named: bool) -> None:
    """Run a rank."""
    counting = Counting()
    torch.set_num_threads(1)
    options: dict[str, Any] = {"rank": rank, "world_size": 2}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **options)
    for name, make in STEPS.items():
        count(counting, make(codec))
        if rank == 0:
            print(line(name, counting), *[names(counting)] * named, sep="\n", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main(
    codec: Annotated[str, typer.Option(help="compressor")] = "int4_group",
    names: Annotated[bool, typer.Option(help="print every function")] = False,
) -> None:
    """Print a line for each way."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_processes(work, (port, codec, names), 2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    typer.run(main)
