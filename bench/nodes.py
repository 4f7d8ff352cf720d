"""Nodes of two ranks on slow links: `ps` over all ranks against `hierarchical`.

    python -m bench.netns run --hosts 2 --rate 100mbit -- python -m bench.nodes

Every host starts its two ranks. For each strategy, rank 0 prints the median time of a step and the
bytes that the host's interface sent in it, headers included. Little is computed, so a step is
communication.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch import nn

from bench.commands import refusing

PER_NODE, WIDTH, STEPS, WARM_UP = 2, 1024, 15, 4
STARTED_BY = "python -m bench.netns run --hosts 2 -- python -m"
STRATEGIES = ("ps", "hierarchical")
SENT = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "lo") / "statistics/tx_bytes"


def on_host(module: str, rank: Callable[[], None], per_node: int = PER_NODE) -> None:
    """Start the ranks of this host, each a `python -m module` with this program's arguments; or be
    one of them."""
    if "LOCAL_RANK" in os.environ:
        rank()
        return
    with refusing():
        if "RANK" not in os.environ:
            raise ValueError(f"no host's number in RANK; start it by {STARTED_BY} {module}")
    first = per_node * int(os.environ["RANK"])
    size = per_node * int(os.environ["WORLD_SIZE"])
    shared = {**os.environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(per_node)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, *sys.argv[1:]],
            env={**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)},
        )
        for local in range(per_node)
    ]
    sys.exit(max(child.wait() for child in children))


def sent_here() -> int:
    """Bytes that this host's interface has sent so far."""
    return int(SENT.read_text())


def _rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for strategy in STRATEGIES:
        seconds, sent = _train(strategy)
        if dist.get_rank() == 0:
            print(f"{strategy:12} {1e3 * seconds:6.0f} ms, {sent / 1e6:.2f} MB a step", flush=True)
    dist.destroy_process_group()


def _train(strategy: str) -> tuple[float, float]:
    """Median seconds of a step, and bytes that this host's interface sent in it."""
    import hipress

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    model = hipress.wrap(nn.Sequential(*layers), "int4_group", strategy=strategy)
    times, sent = [], 0
    for step in range(WARM_UP + STEPS):
        dist.barrier()
        begin = time.perf_counter()
        if step == WARM_UP:
            sent = sent_here()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        times.append(time.perf_counter() - begin)
    dist.barrier()
    sent = sent_here() - sent
    hipress.detach(model)
    return statistics.median(times[WARM_UP:]), sent / STEPS


if __name__ == "__main__":
    typer.run(lambda: on_host("bench.nodes", _rank))
