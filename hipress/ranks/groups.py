"""Process groups of hipress.

DDP's gradients, the user's collectives and hipress's messages must not mix, so each kind of hipress
traffic has its own connections. They are made directly from the job's store:
`torch.distributed.new_group` must be called by every rank of the world, even by those outside the
group, or else derives the group's name from a count that may differ between ranks.

[Note: connecting] Gloo's time-out holds for each of its five attempts per pair of ranks: with half
an hour, a stopped rank would hold up the others for 2.5 hours. So gloo connects in a thread of its
own, and the caller waits for it no longer than the time-out. Gloo does not name the rank for which
it waited, either. Ranks that are connected, or waited in vain, post that in the store: the rank
that does not is the one to look at.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from casync.shutdown import keep_when_forked
from casync.transports.distributed import break_group, start_all_reduce, transport_error
from hipress import compat
from hipress.errors import ConfigMismatch, HipressError, RankLost, SyncError
from hipress.options import LONGEST
from hipress.ranks.coordinator import Coordinator

T = TypeVar("T")


def connect(coordinator: Coordinator, purpose: str) -> dist.ProcessGroup:
    """A gloo group of the ranks; it ends with the last reference to it.

    All ranks of the group must call this, within its time-out. See [Note: connecting]. Raises the
    errors of Coordinator.run_watched, and HipressError if gloo fails.
    """
    rank, size, delay = (
        coordinator.rank,
        len(coordinator.ranks),
        timedelta(seconds=coordinator.timeout),
    )

    def make() -> dist.ProcessGroup:
        return compat.gloo_group(own_store(coordinator, purpose), rank, size, delay)

    mailbox = coordinator.mailbox
    again = f"{mailbox.name}/{purpose}"
    mailbox.epoch.meetings[again] += 1  # gloo's keys of an earlier group are still in the store
    if mailbox.epoch.meetings[again] > 1:
        purpose = f"{purpose} ({mailbox.epoch.meetings[again]})"
    what = f"connecting ranks {coordinator.ranks} for {purpose}"
    try:
        group = coordinator.run_watched(make, what)
    except HipressError as error:
        if not isinstance(error, RankLost) and (hint := _interface_hint()):
            error.args = (f"{error}{hint}",)
        raise
    keep_when_forked(group)
    coordinator.wait_for_all(what)  # ending the group early would break others' connecting
    return group


def _interface_hint() -> str:
    """Advice if gloo listens on an address that no other machine reaches; else ""."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if "GLOO_SOCKET_IFNAME" in os.environ or not address.startswith(("127.", "no")):
        return ""
    return (
        f". gloo, over which ranks agree also where gradients go over NCCL, listens on what this "
        f"machine's name {name!r} resolves to, {address}, which no other machine reaches: where "
        "ranks are on several, set GLOO_SOCKET_IFNAME to the interface that joins them"
    )


def own_store(coordinator: Coordinator, purpose: str) -> compat.Store:
    """The job's store for keys of this purpose, on a connection of its own, as calls block it."""
    own = compat.another_client(coordinator.mailbox.store)
    mailbox = coordinator.mailbox
    return compat.PrefixStore(f"hipress/{mailbox.epoch.name}/{mailbox.name}/{purpose}", own)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Time-out of a group's operations on the CPU, at most LONGEST seconds."""
    return min(compat.group_timeout(group), timedelta(seconds=LONGEST))


def all_reduce_max(values: list[float], group: dist.ProcessGroup) -> list[float]:
    """The largest of each value over the ranks; the same on every rank."""
    data = torch.tensor(values, dtype=torch.float64, device="cpu")
    start_all_reduce_max(data, group).wait()
    return [float(value) for value in data]


def all_reduce_sum(values: list[float], group: dist.ProcessGroup) -> list[float]:
    """The sum of each value over the ranks; the same on every rank."""
    data = torch.tensor(values, dtype=torch.float64, device="cpu")
    sum_over(data, group)
    return [float(value) for value in data]


def sum_over(data: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite float64 values by their sums over the ranks, the same on every rank."""
    if data.numel():
        group.allreduce([data], dist.AllreduceOptions()).wait()


def start_all_reduce_max(
    data: torch.Tensor, group: dist.ProcessGroup
) -> torch.futures.Future[torch.Tensor]:
    """Start an all-reduce; `data` holds the largest values over the ranks once the future is done.
    Raises TransportError."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return start_all_reduce(data, group, options, "an all-reduce")


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, seconds: float) -> None:
    """Overwrite tensors by those of the group's first rank, in place. Raises TransportError."""
    options = dist.BroadcastOptions()
    options.timeout = timedelta(seconds=seconds)
    for tensor in tensors:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        flat = plain.view(-1).view(torch.uint8)
        try:
            group.broadcast([flat], options).wait()
        except RuntimeError as error:
            raise transport_error(error, "taking over the first rank's values", seconds) from None
        if plain.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


def share(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, coordinator: Coordinator
) -> None:
    """Like `broadcast`; raises the errors of Coordinator.run_watched."""
    coordinator.run_watched(
        lambda: broadcast(tensors, group, coordinator.timeout),
        "sharing rank 0's values",
        lambda: break_group(group),
    )


class Agreement:
    """Connections for small collectives by which ranks decide alike. Whoever waits in one is told
    when a rank has ended. All ranks of the group must make it, with the same calls."""

    def __init__(self, coordinator: Coordinator, purpose: str) -> None:
        self._coordinator = coordinator
        self._group: dist.ProcessGroup | None = connect(coordinator, purpose)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._coordinator.ranks)

    @property
    def open(self) -> bool:
        """False after `close`."""
        return self._group is not None

    def run(self, call: Callable[[dist.ProcessGroup], T], what: str) -> T:
        """The result of `call(group)`. Raises the errors of Coordinator.run_watched; the group is
        broken then."""
        group = self._group
        assert group is not None
        return self._coordinator.run_watched(lambda: call(group), what, lambda: break_group(group))

    def run_in_step(self, call: Callable[[dist.ProcessGroup], T], what: str) -> T:
        """Like `run`, but raises SyncError if another rank failed."""
        try:
            return self.run(call, what)
        except ConfigMismatch as error:
            raise SyncError(str(error)) from error

    def largest(self, values: list[float], what: str) -> list[float]:
        """The largest of each value over the ranks, in a step."""
        return self.run_in_step(lambda group: all_reduce_max(values, group), what)

    def close(self) -> None:
        """Disconnect: the others then learn at once that this rank has left."""
        self._group = None  # the group ends with its last reference


class Mean:
    """Means of float32 values over the ranks, the same on each. All must make the same calls, of
    which the first connects them; with one rank nothing travels."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._ranks: Agreement | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor, on the host. Raises the errors of Coordinator.run_watched."""
        if self._alone:
            return values
        total = values.double()
        self._run(lambda group: sum_over(total, group))
        return total.div_(len(self._coordinator.ranks)).float()

    def where_any(self, values: Iterable[torch.Tensor | None]) -> list[bool]:
        """True for each of these that is other than zero on some rank: the mean of the others need
        not travel. One number of each does."""
        flags = [float(each is not None and bool(each.any())) for each in values]
        if not self._alone:
            flags = self._run(lambda group: all_reduce_max(flags, group))
        return [*map(bool, flags)]

    @property
    def _alone(self) -> bool:
        return len(self._coordinator.ranks) == 1

    def _run(self, call: Callable[[dist.ProcessGroup], T]) -> T:
        if self._ranks is None:
            self._ranks = Agreement(self._coordinator, "states")
        return self._ranks.run(call, "averaging states for a checkpoint")

    def close(self) -> None:
        """Disconnect. May repeat."""
        self._ranks = None


def gather(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all ranks, by rank; all have the same shape."""
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([everyone], [mine]).wait()
    return everyone
