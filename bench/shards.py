"""Sharded models on slow links: PyTorch's FSDP2 and HSDP against hipress.

    python -m bench.netns run --hosts 2 --rate 1gbit -- python -m bench.shards
    python -m bench.netns run --hosts 2 --rate 1gbit -- python -m bench.shards --across

Every host starts two ranks, which hold the shards of a GPT, and the replicas are averaged; or, with
`--across`, one rank, and the hosts hold the shards. For each method, rank 0 prints the median time
of a step, the bytes that the host's interface sent in it, headers included, and the most memory
that the rank took for it. Methods take turns. The first one sends nothing between hosts: no other
can be faster.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hipress
from bench.commands import refusing
from bench.loss_workloads import GPT2
from bench.nodes import PER_NODE, STARTED_BY, on_host, sent_here
from hipress.tools.run.jobs import Workload

GPT = Workload(vocabulary=8000, width=256, batch=4, length=32)
LARGE = Workload(vocabulary=12000, width=384, batch=4, length=32)  # 12 million parameters
STEPS, ROUNDS, WARM_UP = 10, 3, 4
TRIAL = 100  # steps, at most, until "auto" has decided
CODECS = ("int4_group", "onebit_group", "auto")
GRADIENTS = ("int4_group", "int8_group")  # of shards on several hosts
PRECISE = MixedPrecisionPolicy()
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass
class Method:
    """A model with its own way of training."""

    title: str
    make: Callable[[], tuple[nn.Module, Callable[[], None]]]  # with what comes after backward()
    workload: Workload = GPT
    warm_up: int = WARM_UP
    seconds: list[float] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        _trim()
        before = _status("VmRSS")
        self.model, self.after = self.make()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.train(self.warm_up)
        self.memory = _status("VmHWM") - before  # bytes

    def train(self, steps: int) -> list[float]:
        """Seconds of each step."""
        found = []
        for _ in range(steps):
            shape = self.workload.batch, self.workload.length + 1
            words = torch.randint(self.workload.vocabulary, shape)
            dist.barrier()
            begin = time.perf_counter()
            self.model(words).backward()
            self.after()
            self._optimizer.step()
            self._optimizer.zero_grad()
            found.append(time.perf_counter() - begin)
        return found

    def measure(self, steps: int) -> None:
        """Measure one turn."""
        before = sent_here()
        self.seconds += self.train(steps)
        dist.barrier()
        self.sent += sent_here() - before

    def line(self) -> str:
        """The lines of the report."""
        middle, megabytes = statistics.median(self.seconds), self.sent / 1e6 / len(self.seconds)
        return (
            f"{self.title:41} {1e3 * middle:6.0f} ms, {megabytes:6.2f} MB a step, "
            f"{self.memory / 1e6:4.0f} MB of memory"
        )


def _trim() -> None:
    """Give freed memory back to the system, and forget the largest size so far."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    """Bytes by a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(name))
    return 1024 * int(line.split()[1])


def rank() -> None:
    """Compare methods between replicas, on a rank."""
    mesh = _start(PER_NODE)
    inside, reduced = mesh["shard"], MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    compressing = _mesh(PER_NODE, {"replicate": "hipress"})
    _compare(
        Method("FSDP, hosts apart", lambda: plain(GPT, inside)),
        Method("HSDP", lambda: plain(GPT, mesh)),
        Method("HSDP, reduced in bfloat16", lambda: plain(GPT, mesh, reduced)),
        Method("HSDP, group hipress, int4_group", lambda: plain(GPT, compressing)),
        *(synchronized(mesh, codec) for codec in CODECS),
    )


def rank_across(steps: int) -> None:
    """Compare methods whose shards are on several hosts, on a rank."""
    mesh = _start(int(os.environ["WORLD_SIZE"]))["shard"]
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("host", "alone"))
    _compare(
        Method("one host's computation", lambda: plain(LARGE, alone["alone"]), LARGE),
        Method("FSDP2", lambda: plain(LARGE, mesh), LARGE),
        Method("FSDP2, bfloat16", lambda: plain(LARGE, mesh, BFLOAT16), LARGE),
        *(
            Method(
                f"HiPress {codec} + int8_group{', bfloat16' * (policy is MIXED)}",
                partial(compressed, mesh, codec, policy),
                LARGE,
            )
            for codec, policy in (*((each, PRECISE) for each in GRADIENTS), (GRADIENTS[0], MIXED))
        ),
        steps=steps,
    )


def _start(shards: int) -> DeviceMesh:
    """Join the ranks, as replicas of a number of shards."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return _mesh(shards)


def _mesh(shards: int, backends: Any = None) -> DeviceMesh:
    """Replicas of a number of shards. backends: by dimension, if others than gloo."""
    shape = (dist.get_world_size() // shards, shards)
    names = ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=backends)


def _compare(*methods: Method, steps: int = STEPS) -> None:
    for _ in range(ROUNDS):
        for method in methods:
            method.measure(steps)
    if dist.get_rank() == 0:
        for method in methods:
            print(method.line(), flush=True)
    dist.destroy_process_group()


def sharded(
    workload: Workload, mesh: DeviceMesh, policy: MixedPrecisionPolicy = PRECISE
) -> nn.Module:
    """The model with its layers sharded over the mesh, or sharded over one dimension and averaged
    by PyTorch over the other. Each layer's weights are gathered as the one before computes."""
    torch.manual_seed(0)
    model = GPT2(workload)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    layers: list[Any] = [*model.layers]
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    return model


def plain(
    workload: Workload, mesh: DeviceMesh, policy: MixedPrecisionPolicy = PRECISE
) -> tuple[nn.Module, Callable[[], None]]:
    """The model with PyTorch's own collectives."""
    return sharded(workload, mesh, policy), lambda: None


def synchronized(mesh: DeviceMesh, codec: str) -> Method:
    """The model sharded within a host, and averaged between hosts by a Synchronizer."""
    told = "adamw" if codec == "auto" else None

    def make() -> tuple[nn.Module, Callable[[], None]]:
        model, group = sharded(GPT, mesh["shard"]), mesh["replicate"].get_group()
        return model, hipress.Synchronizer(model, codec, optimizer=told, process_group=group).step

    return Method(f"HiPress {codec}", make, warm_up=TRIAL if told else WARM_UP)


def compressed(
    mesh: DeviceMesh, codec: str, policy: MixedPrecisionPolicy
) -> tuple[nn.Module, Callable[[], None]]:
    """The model sharded over hosts, with gradients compressed by a codec, and weights in 8 bits."""
    return hipress.shard(sharded(LARGE, mesh, policy), reduce_scatter=codec), lambda: None


def main(
    across: Annotated[bool, typer.Option(help="Spread the shards over the hosts.")] = False,
    steps: Annotated[int, typer.Option(help="Of a turn, with --across.", min=1)] = STEPS,
) -> None:
    """Measure on the hosts of bench.netns."""
    if across:
        with refusing():
            if "RANK" not in os.environ:
                raise ValueError(
                    f"no host's number in RANK; start it by {STARTED_BY} bench.shards --across"
                )
        rank_across(steps)
    else:
        on_host("bench.shards", rank)


if __name__ == "__main__":
    typer.run(main)
