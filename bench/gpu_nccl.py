"""NCCL between two processes: by which of its ways does it run here, on one GPU or two?

    python -m bench.gpu_nccl [--rehearse] [--output FOLDER]

The ways are tried at the same time. Each takes a sum, messages both ways, and a captured sum. From
2.30 on, NCCL allows ranks to share a GPU. Results: gpu_nccl.json, whose `works` names the first
way that worked; the exit status is 1 if none did. --rehearse: over gloo, without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from bench.commands import RESULTS, command_line, now

SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_CUMEM_ENABLE": "0"}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
#: by preference, with their environment
WAYS = {
    "memory of the device": SHARING,
    "shared memory of the host": SHARING | {"NCCL_P2P_DISABLE": "1"},
    "sockets": SHARING | SOCKETS,
    "memory of the device, as NCCL chooses": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
}
SECONDS, PATIENT = 60.0, 240.0  # for all ways; rehearsed, on a busy machine


def attempt(rank: int, path: str, rehearse: bool) -> None:
    """This process's part. Raises an error if a value is wrong."""
    device = torch.device("cpu")
    if not rehearse:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.FileStore(path, 2)  # type: ignore[attr-defined] # not in its annotations
    dist.init_process_group(
        "gloo" if rehearse else "nccl", store=store, rank=rank, world_size=2,
        timeout=timedelta(seconds=PATIENT),
    )  # fmt: skip
    values = torch.full((1 << 20,), rank + 1.0, device=device)
    dist.all_reduce(values)
    assert values.eq(3).all()
    got = torch.zeros_like(values)
    peer = 1 - rank
    both = [dist.P2POp(dist.isend, values + rank, peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert got.eq(3 + peer).all()
    if not rehearse:
        _capture(values)
    dist.barrier()
    os._exit(0)  # a group's end may wait


def _capture(values: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(values)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert values.eq(12).all()


def try_ways(rehearse: bool) -> dict[str, dict[str, Any]]:
    """Results by way: if it worked, and the end of each rank's output."""
    with tempfile.TemporaryDirectory() as folder:
        ways = list(WAYS.items())[: 1 if rehearse else None]
        begun = {way: _begin(env, Path(folder, str(number)), rehearse)
                 for number, (way, env) in enumerate(ways)}  # fmt: skip
        end = monotonic() + (PATIENT if rehearse else SECONDS)
        return {way: _end(ranks, end) for way, ranks in begun.items()}


def _begin(
    env: dict[str, str], path: Path, rehearse: bool
) -> list[tuple[subprocess.Popen[bytes], Path]]:
    ranks = []
    for rank in (0, 1):
        log = path.with_suffix(f".{rank}")
        command = [sys.executable, "-m", "bench.gpu_nccl", "--rank", str(rank), "--at", str(path)]
        with log.open("wb") as out:
            ranks.append((subprocess.Popen(
                command + ["--rehearse"] * rehearse, stdout=out, stderr=out,
                env=os.environ | {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo"} | env,
            ), log))  # fmt: skip
    return ranks


def _end(ranks: list[tuple[subprocess.Popen[bytes], Path]], end: float) -> dict[str, Any]:
    statuses = []
    for process, _ in ranks:
        try:
            statuses.append(process.wait(max(0.1, end - monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            statuses.append(process.wait())
    ends = [log.read_text(errors="replace")[-1500:] for _, log in ranks]
    return {"works": statuses == [0, 0], "statuses": statuses, "told": ends}


def main(
    rehearse: Annotated[bool, typer.Option("--rehearse", help="over gloo")] = False,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    rank: Annotated[int | None, typer.Option(hidden=True)] = None,
    at: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Try all ways and write gpu_nccl.json."""
    if rank is not None:
        attempt(rank, at, rehearse)
        return
    by_way = try_ways(rehearse)
    works = next((way for way, each in by_way.items() if each["works"]), None)
    about = {"date": now(), "command": command_line("bench.gpu_nccl"), "rehearsed": rehearse}
    facts = {**about, "works": works, "env": WAYS[works] if works else {}, "ways": by_way}
    (output / "gpu_nccl.json").write_text(json.dumps(facts, indent=1) + "\n")
    for way, each in by_way.items():
        print(f"{way}: {'works' if each['works'] else each['told']}")
    print(f"NCCL between two processes: {works or 'by no way'}")
    raise typer.Exit(int(works is None))


if __name__ == "__main__":
    typer.run(main)
