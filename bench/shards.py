"""Sharded models on slow links: PyTorch's FSDP2 and HSDP against hipress.

    python -m bench.netns run --hosts 2 --rate 1gbit -- python -m bench.shards
    python -m bench.netns run --hosts 2 --rate 1gbit -- python -m bench.shards --across
    python -m bench.netns run --hosts 2 --rate 1gbit -- python -m bench.shards --across --ranks 2
    python -m bench.netns run --hosts 2 --rate 100mbit -- \\
        python -m bench.shards --across --steps 3 --method bfloat16

Every host starts two ranks, which hold the shards of a GPT, and the replicas are averaged; or, with
`--across`, one rank (or `--ranks`), and the hosts hold the shards. For each method, rank 0 prints
the median time of a step, the bytes that the host's interface sent in it, headers included, and the
most memory that the rank took for it. Methods take turns. The first one sends nothing between
hosts: no other can be faster. `--method` takes those whose titles contain a text.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias

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
LARGE = Workload(vocabulary=12000, width=384, batch=4, length=32)  # 12 million parameters
STEPS, ROUNDS, WARM_UP = 10, 3, 4
TRIAL = 100  # steps, at most, until "auto" has decided
FIXED = ("int4_group", "onebit_group")
CODECS = (*FIXED, "auto")
GRADIENTS = ("int4_group", "int8_group")  # of shards on several hosts
PRECISE = MixedPrecisionPolicy()
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

#: makes a model, with what comes after backward()
_Make: TypeAlias = Callable[[], tuple[nn.Module, Callable[[], None]]]


@dataclass
class Method:
    """A model with its own way of training."""

    title: str
    make: _Make
    workload: Workload
    warm_up: int
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
        seconds = []
        for _ in range(steps):
            shape = self.workload.batch, self.workload.length + 1
            words = torch.randint(self.workload.vocabulary, shape)
            dist.barrier()
            begin = time.perf_counter()
            self.model(words).backward()
            self.after()
            self._optimizer.step()
            self._optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
        return seconds

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


def between_replicas(steps: int, only: Sequence[str]) -> None:
    """Compare methods between replicas, on a rank."""
    mesh = _start(int(os.environ["LOCAL_WORLD_SIZE"]))
    inside, reduced = mesh["shard"], MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    compressing = _mesh(inside.size(), {"replicate": "hipress"})
    methods = {
        "FSDP, hosts apart": partial(plain, GPT, inside),
        "HSDP": partial(plain, GPT, mesh),
        "HSDP, reduced in bfloat16": partial(plain, GPT, mesh, reduced),
        "HSDP, group hipress, int4_group": partial(plain, GPT, compressing),
        **{f"HiPress {codec}": partial(synchronized, mesh, codec) for codec in CODECS},
        **{f"hipress.shard, replicas {codec}": partial(averaged, mesh, codec) for codec in FIXED},
    }
    _compare(methods, GPT, steps, only)


def across_hosts(steps: int, only: Sequence[str]) -> None:
    """Compare methods whose shards are on several hosts, on a rank."""
    mesh = _start(int(os.environ["WORLD_SIZE"]))["shard"]
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("host", "alone"))
    ours = (*((each, PRECISE) for each in GRADIENTS), (GRADIENTS[0], MIXED))
    methods = {
        "one host's computation": partial(plain, LARGE, alone["alone"]),
        "FSDP2": partial(plain, LARGE, mesh),
        "FSDP2, bfloat16": partial(plain, LARGE, mesh, BFLOAT16),
        **{
            f"HiPress {codec} + int8_group{', bfloat16' * (policy is MIXED)}": partial(
                compressed, mesh, codec, policy
            )
            for codec, policy in ours
        },
    }
    _compare(methods, LARGE, steps, only)


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


def _compare(
    methods: Mapping[str, _Make], workload: Workload, steps: int, only: Sequence[str]
) -> None:
    """Measure in turns the methods whose titles contain one of the texts, or all without any."""
    chosen = [
        Method(title, make, workload, TRIAL if title.endswith("auto") else WARM_UP)
        for title, make in methods.items()
        if not only or any(text in title for text in only)
    ]
    for _ in range(ROUNDS):
        for method in chosen:
            method.measure(steps)
    if dist.get_rank() == 0:
        for method in chosen:
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


def synchronized(mesh: DeviceMesh, codec: str) -> tuple[nn.Module, Callable[[], None]]:
    """The model sharded within a host, and averaged between hosts by a Synchronizer."""
    kind = "adamw" if codec == "auto" else None
    model, group = sharded(GPT, mesh["shard"]), mesh["replicate"].get_group()
    return model, hipress.Synchronizer(model, codec, optimizer=kind, process_group=group).step


def averaged(mesh: DeviceMesh, codec: str) -> tuple[nn.Module, Callable[[], None]]:
    """The model sharded within a host, and averaged between hosts by `hipress.shard`."""
    model, group = sharded(GPT, mesh["shard"]), mesh["replicate"].get_group()
    hipress.shard(model, reduce_scatter=None, all_gather=None, replicas=codec, replica_group=group)
    return model, lambda: None


def compressed(
    mesh: DeviceMesh, codec: str, policy: MixedPrecisionPolicy
) -> tuple[nn.Module, Callable[[], None]]:
    """The model sharded over hosts, with gradients compressed by a codec, and weights in 8 bits."""
    return hipress.shard(sharded(LARGE, mesh, policy), reduce_scatter=codec), lambda: None


def main(
    across: Annotated[bool, typer.Option(help="Spread the shards over the hosts.")] = False,
    ranks: Annotated[
        int | None, typer.Option(help="Of a host: 2, or 1 with --across.", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Of a turn.", min=1)] = STEPS,
    method: Annotated[
        list[str] | None, typer.Option(help="A part of a method's title; may be repeated.")
    ] = None,
) -> None:
    """Measure on the hosts of bench.netns."""
    here = across_hosts if across else between_replicas
    each = ranks or (1 if across else PER_NODE)
    on_host("bench.shards", lambda: here(steps, method or ()), each)


if __name__ == "__main__":
    typer.run(main)
