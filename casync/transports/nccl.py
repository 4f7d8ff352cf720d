"""NCCL: payloads move from device to device. See [Note: slots] in building/tasks.py.

[Note: order in a slot] A slot is a group of all its messages, then a group of the reduces of each
set of ranks, in the order of the graph. All ranks post them in this order on one stream, so no two
ranks ever wait for each other in different communicators. Messages without bytes are left out on
both sides.

[Note: time-outs on a device] A call that connects two ranks blocks the host until both are there,
and a kernel that waits for a peer occupies the device for ever. Only aborting the communicator ends
either. So a thread polls the current call and an event after each group, the oldest first; after
the time-out it aborts, and the next call raises the error. The peers learn of it at their own
time-outs, or from NCCL if that reports a peer that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress

import torch

from casync.errors import TransportAborted, TransportError, copy_to_raise
from casync.memory import Memory
from casync.nccl import Communicator, Connect
from casync.nccl.distributed import capturing
from casync.nccl.watchdog import Watchdog
from casync.shutdown import start_thread
from casync.transports import Member

__all__ = ["NcclTransport"]

_LOOK = 0.05  # seconds between checks for an error
_PATIENCE = 5.0  # seconds that abort() waits for NCCL


class NcclTransport:
    """An endpoint. Only one thread at a time calls `exchange`. Implements SlotTransport."""

    def __init__(
        self,
        connect: Connect,
        rank: int,
        world_size: int,
        memory: Memory,
        timeout: float,
        *,
        tell: Callable[[TransportError], None] = lambda error: None,
        stream: Callable[[], int] | None = None,
    ) -> None:
        """Connect all ranks, each of which calls this.

        `connect` is called again for ranks that reduce among themselves, at their first reduce.

        memory: of the device. timeout: seconds that a peer may take. tell: called with the error
        that ends this endpoint, unless that is its own abort. stream: returns the current
        cudaStream_t. If a CUDA graph captures a group, its launcher must watch for time-outs.
        """
        self._rank, self._world_size = rank, world_size
        self._connect, self._tell = connect, tell
        self._stream = stream or _current_stream
        self._memory = memory
        self._error: TransportError | None = None
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._everybody = tuple(range(world_size))
        self._watchdog = Watchdog(rank, timeout, self._fail, self._failure, memory)
        self._communicator(self._everybody)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def exchange(self, transfers: Sequence[Member]) -> None:
        """Implements SlotTransport.exchange; see [Note: order in a slot]."""
        full = [transfer for transfer in transfers if transfer.data.numel()]
        stream, names = self._stream(), [each.name for each in full]
        messages = [each for each in full if each.kind != "reduce"]
        reduces: dict[tuple[int, ...], list[Member]] = {}
        for each in (each for each in full if each.kind == "reduce"):
            reduces.setdefault(each.ranks, []).append(each)
        with self._blocking(names):
            if messages:
                _post(self._communicator(self._everybody), messages, stream)
            for ranks, sums in reduces.items():
                _post(self._communicator(ranks), sums, stream)
        if not capturing():
            event = self._memory.event()
            self._memory.caller().record(event)
            self._watchdog.watch(event, names, full)

    def abort(self) -> None:
        self._end(TransportAborted(f"rank {self._rank} closed its communicators"))

    def close(self) -> None:
        """Implements SlotTransport.close. Current groups end first, or at the time-out.

        Ranks that share memory close together: aborting would take it from a rank that still reads.
        """
        self._watchdog.close()
        if self._error is None:
            self._error = TransportAborted(f"rank {self._rank} closed its communicators")
            self._all(lambda communicator: communicator.close())

    @contextmanager
    def _blocking(self, names: Sequence[str]) -> Iterator[None]:
        """Run calls of NCCL; raise TransportError for theirs or that which ended this endpoint."""
        self._check()
        try:
            with self._watchdog.call(names):
                yield
        except TransportError:
            raise
        except Exception as error:
            self._check()  # an abort's own error names the cause
            raise TransportError(f"{', '.join(names)} failed: {error}") from error
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise copy_to_raise(self._error)

    def _communicator(self, ranks: tuple[int, ...]) -> Communicator:
        if ranks not in self._communicators:
            with self._blocking([f"connecting ranks {list(ranks)}"]):
                self._communicators[ranks] = self._connect_in_thread(ranks)
        return self._communicators[ranks]

    def _connect_in_thread(self, ranks: tuple[int, ...]) -> Communicator:
        """Connect in a thread: NCCL may wait for a rank that is gone, and an unfinished
        communicator cannot be aborted. One that is finished after the time-out is aborted then."""
        connection = Future[Communicator]()

        def run() -> None:
            try:
                connection.set_result(self._connect(ranks))
            except Exception as error:
                connection.set_exception(error)
            else:
                if self._error is not None:
                    connection.result().abort()

        start_thread(run, "casync-nccl-connect")
        while not wait([connection], _LOOK).done:
            self._check()
        return connection.result()

    def _failure(self) -> str:
        """The first failure of a communicator, or ""."""
        return next(
            filter(None, (each.failure() for each in list(self._communicators.values()))), ""
        )

    def _fail(self, error: TransportError) -> None:
        """End by an error of the watchdog."""
        if self._error is None:
            self._end(error)
            self._tell(error)

    def _end(self, error: TransportError) -> None:
        if self._error is None:
            self._error = error
            self._watchdog.stop()
            self._all(lambda communicator: communicator.abort())

    def _all(self, call: Callable[[Communicator], None]) -> None:
        """Call each communicator in a thread: NCCL may wait for ranks that are gone."""

        def run() -> None:
            for communicator in list(self._communicators.values()):
                with suppress(Exception), self._memory.current():
                    call(communicator)

        start_thread(run, "casync-nccl-end").join(_PATIENCE)


def _post(communicator: Communicator, transfers: Sequence[Member], stream: int) -> None:
    with communicator.group():
        for each in transfers:
            if each.kind == "send":
                communicator.send(each.data, each.ranks[0], stream)
            elif each.kind == "recv":
                communicator.recv(each.data, each.ranks[0], stream)
            elif each.shares and all(each.shares):
                communicator.reduce_scatter(torch.split(each.data, [*each.shares]), each.op, stream)
            else:  # it is right to give the sum to ranks that do not need it
                communicator.all_reduce(each.data, each.op, stream)


def _current_stream() -> int:
    # without an index torch asks whether there is a device at all, which takes 20 microseconds
    return int(torch.cuda.current_stream(torch.cuda.current_device()).cuda_stream)
