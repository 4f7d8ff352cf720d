"""Replicas of a sharded model on slow links: PyTorch's HSDP against a Synchronizer between them.

    python -m bench.netns run --hosts 2 --rate 1gbit -- python -m bench.shards

Every host starts two ranks, which hold the shards of a GPT. For each method, rank 0 prints the
median time of a step and the bytes that the host's interface sent in it, headers included. Methods
take turns. The first one averages nothing between hosts: no other can be faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hipress
from bench.loss_workloads import GPT2
from bench.nodes import PER_NODE, on_host, sent_here
from hipress.tools.run.jobs import Workload

GPT = Workload(vocabulary=8000, width=256, batch=4, length=32)
STEPS, ROUNDS, WARM_UP = 10, 3, 4
TRIAL = 100  # steps, at most, until "auto" has decided
CODECS = ("int4_group", "onebit_group", "auto")


@dataclass
class Method:
    """A model with its own way of training."""

    title: str
    model: nn.Module
    after: Callable[[], None] = lambda: None  # the backward pass
    warm_up: int = WARM_UP
    seconds: list[float] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self, steps: int) -> list[float]:
        """Seconds of each step."""
        found = []
        for _ in range(steps):
            words = torch.randint(GPT.vocabulary, (GPT.batch, GPT.length + 1))
            dist.barrier()
            begin = time.perf_counter()
            self.model(words).backward()
            self.after()
            self._optimizer.step()
            self._optimizer.zero_grad()
            found.append(time.perf_counter() - begin)
        return found

    def measure(self) -> None:
        """Measure one turn."""
        before = sent_here()
        self.seconds += self.train(STEPS)
        dist.barrier()
        self.sent += sent_here() - before

    def line(self) -> str:
        """The lines of the report."""
        middle, megabytes = statistics.median(self.seconds), self.sent / 1e6 / len(self.seconds)
        return f"{self.title:28} {1e3 * middle:6.0f} ms, {megabytes:6.2f} MB a step"


def rank() -> None:
    """Run on a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // PER_NODE, PER_NODE)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    bf16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    methods = [
        Method("FSDP, hosts apart", sharded(mesh["shard"])),
        Method("HSDP", sharded(mesh)),
        Method("HSDP, reduced in bfloat16", sharded(mesh, bf16)),
        *(synchronized(mesh, codec) for codec in CODECS),
    ]
    for method in methods:
        method.train(method.warm_up)
    for _ in range(ROUNDS):
        for method in methods:
            method.measure()
    if dist.get_rank() == 0:
        for method in methods:
            print(method.line(), flush=True)
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """The model with its layers sharded over the mesh, or sharded over one dimension and averaged
    by PyTorch over the other."""
    torch.manual_seed(0)
    model = GPT2(GPT)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def synchronized(mesh: DeviceMesh, codec: str) -> Method:
    """The model sharded within a host, and averaged between hosts by a Synchronizer."""
    model, group = sharded(mesh["shard"]), mesh["replicate"].get_group()
    told = "adamw" if codec == "auto" else None
    sync = hipress.Synchronizer(model, codec, optimizer=told, process_group=group)
    return Method(f"HiPress {codec}", model, sync.step, TRIAL if told else WARM_UP)


if __name__ == "__main__":
    typer.run(lambda: on_host("bench.shards", rank))
