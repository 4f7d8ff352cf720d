"""Time of the first `wrap`, with no kernel compiled, and of DDP: python -m bench.first_use

Two emulated hosts and the demo's model; every figure has a fresh process and cache. Seconds count
from the moment when the process group exists. Takes a minute or two.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Annotated

import typer

from bench import ranks
from bench.commands import refusing
from bench.netns import Network, require

KINDS = {"ddp": "DistributedDataParallel", "wrap": "hipress.wrap"}
HOSTS = 2


def rank(kind: str, cache: str) -> None:
    """Make a module of one kind on this host."""
    os.environ["COMPLL_CACHE"] = cache
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hipress
    from hipress.tools.demo import model
    from hipress.tools.demo.job import Workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = model.build(Workload())
    dist.barrier()
    start = time.perf_counter()
    (DistributedDataParallel if kind == "ddp" else hipress.wrap)(module)
    ranks.tell(seconds=time.perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()


def main(
    rate: Annotated[str, typer.Option(help="Speed of emulated links.")] = "1gbit",
    runs: Annotated[int, typer.Option(help="Runs of each kind.", min=1)] = 5,
) -> None:
    """Print a line for each kind."""
    with refusing():
        require(HOSTS, rate)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with Network(HOSTS, rate) as network:
        for _ in range(runs):
            for kind, times in seconds.items():
                with tempfile.TemporaryDirectory() as cache:
                    (found,) = ranks.told(network, "bench.first_use", [kind, cache])
                times.append(found["seconds"])
    for kind, times in seconds.items():
        middle = statistics.median(times)
        print(f"{KINDS[kind]}: {middle:.1f} s, {min(times):.1f} to {max(times):.1f}")


if __name__ == "__main__":
    ranks.run(main, rank)
