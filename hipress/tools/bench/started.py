"""A real cluster: ranks that torchrun, Slurm, MPI, Ray Train or submitit started.

    torchrun --nnodes 2 --nproc-per-node 1 --master-addr HOST --node-rank NUMBER \
        --no-python hipress bench
    srun -N 2 --ntasks-per-node 1 hipress bench
    mpirun -n 2 -x MASTER_ADDR=HOST hipress bench

Each rank starts a process of its own for every method, as on emulated hosts, so that a method that
fails leaves nothing behind. Rank 0 writes the results.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hipress.errors import HipressError
from hipress.tools.run import corpus, runner
from hipress.tools.run.jobs import Job, Result
from hipress.tools.run.place import Loopback

PORT = "29500"
#: names of the variables that hold a rank's number, their count, and its number on its host
_STARTERS = {
    "environment variables": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # as of Ray and submitit
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}


@dataclass(frozen=True)
class Started:
    """The program that started this process, and its numbers."""

    by: str
    rank: int
    ranks: int
    local: int  # number on its host

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Started:
        """Read a starter's variables. Raises ValueError if there are none."""
        for by, (rank, ranks, local) in _STARTERS.items():
            if rank in environment and ranks in environment:
                numbers = (environment[rank], environment[ranks], environment.get(local, "0"))
                known = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else by
                return cls(known, *map(int, numbers))
        raise ValueError(
            "no rank was started: start this on every one, with torchrun --nnodes 2 "
            "--nproc-per-node 1 --master-addr HOST --node-rank NUMBER --no-python hipress bench, "
            "or with srun or mpirun"
        )

    @staticmethod
    def there(environment: Mapping[str, str]) -> bool:
        """True if a starter has set its variables."""
        return any(
            rank in environment and ranks in environment for rank, ranks, _ in _STARTERS.values()
        )


def master(environment: Mapping[str, str]) -> str:
    """The host of rank 0. Raises ValueError if it is unknown."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if hosts is None:
        raise ValueError("set MASTER_ADDR to the host of rank 0 on every rank")
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", hosts)  # such as node[03-07,12] or a,b
    assert first is not None
    return first[1] + (first[2] or "")


class Cluster:
    """The ranks, joined by a group of their own; a context manager."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.started = Started.read(environment)
        self._address = f"{master(environment)}:{environment.get('MASTER_PORT', PORT)}"
        self._place = Here(environment.get("GLOO_SOCKET_IFNAME", ""))
        self._joined = False  # True if a group was made here, to be destroyed
        self.hosts = self._sharers = 0
        self._names: list[str] = []  # of hosts, by rank

    def __enter__(self) -> Cluster:
        here = self.started
        # torchrun's own store has MASTER_PORT, and rank 0 does not make it
        own = "env://" if here.by == "torchrun" else f"tcp://{self._address}"
        if not dist.is_initialized():  # Ray Train has done it
            dist.init_process_group(
                "gloo", own, rank=here.rank, world_size=here.ranks, timeout=timedelta(minutes=10)
            )
            self._joined = True
        names = self._names = self._gather(socket.gethostname())
        self.hosts, self._sharers = len(set(names)), names.count(names[here.rank])
        return self

    def __exit__(self, *_: object) -> None:
        if self._joined:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """True on the rank that prints and writes."""
        return self.started.rank == 0

    @property
    def sentence(self) -> str:
        """A sentence for the head of a table."""
        here = self.started
        hosts = "host" if self.hosts == 1 else "hosts"
        return f"{here.ranks} real ranks on {self.hosts} {hosts}, started by {here.by}"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.started.ranks

    @property
    def per_host(self) -> int:
        """Ranks of each host, if all have as many and their numbers follow each other; else 1."""
        each = self._names.count(self._names[0])
        blocks = [self._names[at : at + each] for at in range(0, self.ranks, each)]
        even = all(len(block) == each and len({*block}) == 1 for block in blocks)
        return each if even and len(blocks) == self.hosts else 1

    def run(self, job: Job, on_step: runner.OnStep = lambda done: None) -> Result:
        """Train with a method on all ranks; the result is equal on each, and holds failures."""
        try:
            return runner.result(job, self.events(job, on_step))
        except runner.RunError as error:
            return runner.result(job, [], str(error))

    def events(self, job: Job, on_step: runner.OnStep = lambda done: None) -> list[runner.Event]:
        """The `done` events of all ranks, in order, on each rank. Raises RunError on all."""
        numbers = self._in_turn(corpus.prepare)
        rendezvous = f"tcp://{self._address.rpartition(':')[0]}:{self._port()}"
        rank, local = self.started.rank, self.started.local
        own = self._gather(_gpu(job, local))
        nccl = None not in own and len(set(own)) == len(own)
        ranks = runner.Ranks([rank], str(numbers), rendezvous, self._sharers, nccl, local)
        gathered = self._gather(_try(lambda: runner.watch(self._place, job, ranks, on_step)))
        for each in gathered:
            if isinstance(each, str):
                raise runner.RunError(each)
        return [event for each in gathered for event in each]

    def _in_turn(self, call: Callable[[], Any]) -> Any:
        """Call first on one rank of each host, then on the others, which find its files."""
        for turn in (self.started.local == 0, self.started.local != 0):
            if turn:
                result = call()
            dist.barrier()
        return result

    def _port(self) -> int:
        """A port that is free on rank 0."""
        port = 0
        if self.first:
            with socket.socket() as probe_:
                probe_.bind(("", 0))
                port = probe_.getsockname()[1]
        return int(self._gather(port)[0])

    def _gather(self, mine: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        every: list[Any] = [None] * self.started.ranks
        dist.all_gather_object(every, mine)
        return every


@dataclass(frozen=True)
class Here:
    """This host, with the interface for gloo; "" if gloo finds one itself."""

    interface: str

    def start(self, rank: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program without torchrun's variables, whose store it would use."""
        env = {k: v for k, v in options["env"].items() if not k.startswith("TORCHELASTIC_")}
        return Loopback().start(rank, arguments, **{**options, "env": env})


def _gpu(job: Job, local: int) -> str | None:
    """UUID of this rank's GPU; None on a CPU."""
    count = runner.gpus(job)
    return str(torch.cuda.get_device_properties(local % count).uuid) if count else None


def _try(call: Callable[[], Sequence[Any]]) -> Sequence[Any] | str:
    """The result of a call, or its error's message."""
    try:
        return call()
    except (runner.RunError, OSError, HipressError) as error:
        return str(error)
