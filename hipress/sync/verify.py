"""verify=True: compare a hash of every averaged gradient between the ranks, every step."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.runtime.exits import close_at_exit
from hipress.errors import DivergenceError, SyncError
from hipress.model import Param
from hipress.ranks.link import gather

Request = tuple["Future[torch.Tensor]", "Future[torch.Tensor]", Sequence[Param], int]


class Verifier:
    """A thread that checks buckets in the order in which they were submitted, on its own group.

    A thread, because waiting inside a future's callback hangs; one order, because all ranks
    must exchange the hashes of the same bucket at the same time. So what fails is the end: this
    rank skips a turn, and hashes of later buckets would meet other ranks' of that one.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group: dist.ProcessGroup | None = group
        self._ranks = ranks
        self._name = ranks[group.rank()]
        self._process = os.getpid()
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hipress-verify", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def check(
        self, future: Future[torch.Tensor], params: Sequence[Param], step: int
    ) -> Future[torch.Tensor]:
        """A future that completes like `future`, or with a DivergenceError; in a forked child,
        where there is no thread, `future`, which has failed."""
        if os.getpid() != self._process:
            return future
        checked: Future[torch.Tensor] = Future()
        self._requests.put((future, checked, params, step))
        return checked

    def close(self) -> None:
        """End the thread. Nothing in a forked child: see [Note: fork] in runtime/exits.py."""
        if os.getpid() != self._process:
            return
        self._requests.put(None)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._group = None  # ends with the last reference

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            future, checked, params, step = request
            try:
                buffer = future.wait()
                self._compare(buffer, params, step)
            except Exception as error:
                self._group = None  # ends with the last reference: nobody waits for this rank
                checked.set_exception(error)  # type: ignore[arg-type] # torch's annotation is wrong
            else:
                checked.set_result(buffer)

    def _compare(self, buffer: torch.Tensor, params: Sequence[Param], step: int) -> None:
        where = f"rank {self._name}, step {step}"
        if self._group is None:
            raise SyncError(f"{where}: verify ended when an earlier bucket failed")
        mine = torch.tensor(hashes(buffer, params), dtype=torch.int64)
        try:
            everyone = gather(mine, self._group)
        except RuntimeError as error:
            raise SyncError(f"{where}: verify could not compare ranks: {error}") from error
        for rank, other in zip(self._ranks, everyone, strict=True):
            different = (other != everyone[0]).nonzero()
            if len(different):
                name = params[int(different[0])].name
                raise DivergenceError(
                    f"step {step}: ranks {self._ranks[0]} and {rank} hold different averages of "
                    f"{name!r} ({len(different)} of {len(params)} parameters of its bucket)"
                )


def hashes(buffer: torch.Tensor, params: Sequence[Param]) -> list[int]:
    """A 63-bit hash of each parameter's gradient, bit for bit."""
    reals = 2 if params[0].dtype.is_complex else 1  # DDP's buckets hold these as pairs of reals
    pieces = torch.split(buffer.detach(), [reals * p.numel for p in params])
    return [_hash(piece.contiguous().view(torch.uint8)) for piece in pieces]


def _hash(data: torch.Tensor) -> int:
    digest = hashlib.blake2b(data.numpy().data, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
