"""verify=True: compare hashes of every averaged gradient, and sometimes of parameters."""

from __future__ import annotations

import hashlib
import os
import queue
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.errors import fail_future
from casync.memory import Memory
from casync.shutdown import close_at_exit, start_thread
from casync.transports.distributed import break_group, transport_error
from hipress.errors import DivergenceError, SyncError
from hipress.model.params import Param
from hipress.ranks.groups import gather

GRACE = 1.0  # seconds in which comparisons under way may end
VERIFY_STEPS = 100
"""Parameters are compared before the second step, and every VERIFY_STEPS steps after it."""


@dataclass(frozen=True)
class _Request:
    """A comparison: of given hashes, or of hashes of a future's values."""

    future: Future[torch.Tensor]
    checked: Future[torch.Tensor]
    params: Sequence[Param]
    step: int
    hashes: Sequence[int] | None = None

    @property
    def what(self) -> str:
        """Kind of compared values."""
        return "averages" if self.hashes is None else "parameters"


class Verifier:
    """A thread that checks buckets in the order in which they were submitted, on its own group.

    A thread, because waiting inside a future's callback hangs; one order, because all ranks must
    exchange the hashes of the same bucket at the same time. So the first failure ends it: this rank
    skips a turn, and its hashes of later buckets would meet the others' of that one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        memory: Memory,
    ) -> None:
        """memory: of gradients."""
        self._memory = memory
        self._group: dist.ProcessGroup | None = group
        self._ranks = ranks
        self._name = ranks[group.rank()]
        self._process = os.getpid()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = start_thread(self._run, "hipress-verify")
        close_at_exit(self)

    def check(
        self, future: Future[torch.Tensor], params: Sequence[Param], step: int
    ) -> Future[torch.Tensor]:
        """A future that completes like `future`, or with a DivergenceError. In a forked child,
        which has no thread, returns `future`, which has failed."""
        if os.getpid() != self._process:
            return future
        checked = self._memory.future()
        self._requests.put(_Request(future, checked, params, step))
        return checked

    def check_parameters(
        self, values: Iterable[torch.Tensor], params: Sequence[Param], step: int
    ) -> Future[torch.Tensor]:
        """A future that completes, without a value, when ranks are found to hold the same
        parameters; they may change as soon as this returns."""
        nothing, checked = Future[torch.Tensor](), Future[torch.Tensor]()
        nothing.set_result(torch.empty(0, device="cpu"))
        hashed = [hash_of(value) for value in values]
        self._requests.put(_Request(nothing, checked, params, step, hashed))
        return checked

    def close(self) -> None:
        """End the thread. In a forked child, do nothing: see [Note: fork] in shutdown.py."""
        if os.getpid() != self._process:
            return
        self._requests.put(None)
        self._thread.join(GRACE)
        if self._thread.is_alive():
            self._break()
            self._thread.join(GRACE)
        self._group = None  # the group ends with its last reference

    def _break(self) -> None:
        """Let no rank wait for this one any more."""
        group, self._group = self._group, None
        if group is not None:
            break_group(group)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                with self._memory.current():
                    buffer = request.future.wait()
                    mine = request.hashes or hashes(buffer, request.params)
                self._compare(mine, request)
            except Exception as error:
                self._break()
                fail_future(request.checked, error)
            else:
                request.checked.set_result(buffer)

    def _compare(self, mine: Sequence[int], request: _Request) -> None:
        where = f"rank {self._name}, step {request.step}"
        if self._group is None:
            raise SyncError(f"{where}: verify ended when an earlier bucket failed")
        try:
            everyone = gather(torch.tensor(mine, dtype=torch.int64, device="cpu"), self._group)
        except RuntimeError as error:
            raise transport_error(error, f"{where}: verify's exchange of hashes") from None
        stacked = torch.stack(everyone)
        different = (stacked != stacked[0]).any(0).nonzero().flatten().tolist()
        if different:
            values = stacked[:, different[0]].tolist()
            what = f"{request.what} of {request.params[different[0]].name!r}"
            raise DivergenceError(
                f"step {request.step}: {_odd_ranks(values, self._ranks, what)} "
                f"({len(different)} of {len(request.params)} parameters compared)"
            )


def _odd_ranks(values: Sequence[int], ranks: Sequence[int], what: str) -> str:
    """Text on the ranks that differ, if most hold the same."""
    most, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(ranks):
        return f"ranks {' and '.join(map(str, ranks))} hold different {what}"
    odd = [str(rank) for rank, own in zip(ranks, values, strict=True) if own != most]
    return f"rank {' and '.join(odd)} holds other {what} than most ranks"


def hashes(buffer: torch.Tensor, params: Sequence[Param]) -> list[int]:
    """A 63-bit hash of each parameter's gradient, bit for bit."""
    pieces = torch.split(buffer.detach(), [param.reals for param in params])
    return [hash_of(piece) for piece in pieces]


def hash_of(values: torch.Tensor) -> int:
    """A 63-bit hash of a tensor's bits."""
    data = values.detach().cpu().reshape(-1).view(torch.uint8)
    digest = hashlib.blake2b(data.numpy().data, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
