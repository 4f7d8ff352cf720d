"""Emulated hosts for any program, and a check that their links are as fast as they say.

    python -m bench.netns check --hosts 2 --rate 1gbit
    python -m bench.netns run --hosts 4 --rate 100mbit -- python train.py

`run` starts the program once per host, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
GLOO_SOCKET_IFNAME set as torch.distributed reads them. From Python:

    from bench.netns import Network

The implementation ships with `hipress bench`, which needs it outside a checkout; bench is not in
the wheel (a top-level package of that name would be rude), so the code lives there, once, and is
offered here.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from bench.commands import refusing
from hipress.tools.run.ending import orderly_end
from hipress.tools.run.netns import (
    INTERFACE,
    Counters,
    Network,
    NetworkError,
    parse_rate,
    remove_stale,
    unavailable,
)

__all__ = [
    "INTERFACE",
    "Counters",
    "Network",
    "NetworkError",
    "parse_rate",
    "remove_stale",
    "unavailable",
]

# A paragraph a line: typer keeps line ends.
_HELP = """Emulated hosts for any program, and a check that their links are as fast as they say.

python -m bench.netns check --hosts 2 --rate 1gbit

python -m bench.netns run --hosts 4 --rate 100mbit -- python train.py

`run` starts the program once per host, with the variables that torch.distributed reads."""
app = typer.Typer(help=_HELP, no_args_is_help=True, add_completion=False)
Hosts = Annotated[int, typer.Option(help="Emulated hosts.")]
Rate = Annotated[str, typer.Option(help="Speed of every link, 100kbit to 100gbit.")]

PATIENCE = 5.0  # seconds that programs have to end

_ALL_REDUCE = """
import sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.ones(int(sys.argv[1]))
dist.all_reduce(x)
start = time.perf_counter()
for _ in range(3):
    dist.all_reduce(x)
if dist.get_rank() == 0:  # into a file: some releases of torch print to stdout themselves
    open(sys.argv[2], "w").write(str((time.perf_counter() - start) / 3))
dist.destroy_process_group()
"""


@app.command()
def run(program: list[str], hosts: Hosts = 2, rate: Rate = "1gbit") -> None:
    """Run a program on every host; returns the exit status of the first host that fails."""
    with refusing():
        require(hosts, rate)
    with Network(hosts, rate) as network:
        raise typer.Exit(run_everywhere(network, program))


@app.command()
def check(hosts: Hosts = 2, rate: Rate = "1gbit") -> None:
    """Compare gloo's all-reduce and the interface counters with the rate."""
    with refusing():
        require(hosts, rate, least=2)
    gbits, overhead = measure(hosts, rate)
    print(f"{hosts} hosts, {rate}: all-reduce bus bandwidth {gbits:.3f} Gbit/s, ", end="")
    print(f"interface bytes {overhead:.4f} of the payload")


def run_everywhere(network: Network, program: list[str]) -> int:
    """Run a program on every host at once; returns the first nonzero status."""
    children = [
        network.start(rank, program, env=environment(network, rank))
        for rank in range(network.hosts)
    ]
    try:
        statuses = [child.wait() for child in children]
    finally:
        _end(children)
    return next((status for status in statuses if status), 0)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask running programs, and all that they started, to end; after a while kill them."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        left = [child for child in children if child.poll() is None]
        for child in left:
            os.killpg(child.pid, how)
        for child in left:
            with suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE)


def measure(hosts: int, rate: str) -> tuple[float, float]:
    """Bus bandwidth of gloo's all-reduce (Gbit/s), and interface bytes over payload bytes."""
    # A second's worth of traffic, within reason.
    numbers = min(max(parse_rate(rate) // 64, 100_000), 20_000_000)
    payload = 2 * (hosts - 1) / hosts * 4 * numbers
    with Network(hosts, rate) as network, tempfile.TemporaryDirectory() as folder:
        before = network.counters(0).sent
        output = Path(folder, "seconds")
        program = [sys.executable, "-c", _ALL_REDUCE, str(numbers), str(output)]
        if run_everywhere(network, program):
            raise NetworkError("the all-reduce failed, see above")
        sent = network.counters(0).sent - before
        return payload * 8e-9 / float(output.read_text()), sent / (4 * payload)


def environment(network: Network, rank: int) -> dict[str, str]:
    """The environment variables of a host, as torch.distributed reads them."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(network.hosts),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": network.interface,
    }


def require(hosts: int, rate: str, least: int = 1) -> None:
    """Raise ValueError if the numbers are invalid, or hosts cannot be emulated here."""
    Network(hosts, rate)  # makes nothing before it is entered
    if hosts < least:
        raise ValueError(f"{hosts} hosts: expected {least} to 250")
    reason = unavailable()
    if reason is not None:
        raise ValueError(f"hosts cannot be emulated here: {reason}")


if __name__ == "__main__":
    with orderly_end("bench.netns"):
        app()
