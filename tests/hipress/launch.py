"""Run a function on several real processes joined by gloo, with a hard time-out.

    results = launch(ranks.parity, 2, "none")      # ranks.parity(rank, world_size, "none")

Processes are forked from a server that has imported torch but run nothing, so they start fast. The
store lives in this process, so it survives the death of any rank.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import HANG

DIED = "died"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.hipress.preload"])


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = HANG,
    may_die: Collection[int] = (),
) -> list[Any]:
    """`function(rank, world_size, *args)` on each rank; its results by rank.

    Raises AssertionError with the traceback of every rank that failed, or that did not end in
    time. A rank in `may_die` may end without a result, which is DIED then.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_main, args=(there, store.port, rank, world_size, function, args), daemon=True
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return _gather(pipes, timeout, may_die)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _gather(pipes: list[Connection], timeout: float, may_die: Collection[int]) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, tuple[bool, Any]] = {}
    while len(results) < len(pipes):
        open_ = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                results[rank] = pipe.recv()
            except EOFError:
                results[rank] = (rank in may_die, DIED)
    missing = [rank for rank in range(len(pipes)) if rank not in results]
    wrong = [f"--- rank {r}:\n{value}" for r, (good, value) in sorted(results.items()) if not good]
    if missing:
        wrong.append(f"--- ranks {missing} did not end within {timeout} s")
    assert not wrong, "\n".join(wrong)
    return [results[rank][1] for rank in range(len(pipes))]


def _main(
    pipe: Connection,
    port: int,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=HANG)
        )
        dist.barrier()  # a rank that ends or destroys its group would break others' connecting
        pipe.send((True, function(rank, world_size, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Others may still need this rank's connections; the parent ends all ranks together.
    time.sleep(3600)
