"""FSDP2's collectives, compressed: the objects that take the place of its own.

[Note: order on the host] FSDP2 orders its collectives by CUDA streams and ignores the Work of a
reduce-scatter. So on a device each waits at once, which makes the current stream wait, not the
host. The CPU has no streams: there an all-gather returns a Work, for which FSDP2 waits before it
uses the parameters, and a sum may arrive until the backward pass is over, as long as FSDP2 only
makes views of the output (`Group.reads_late`). At most `buffers` inputs wait so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

from hipress import compat
from hipress.engine.exchange import Exchange, Piece
from hipress.engine.failures import Failures
from hipress.engine.futures import wait_within
from hipress.errors import SyncError
from hipress.model.torch_modes import ordinary
from hipress.sharding.fsdp import Comm, Group, divisor_of

__all__ = ["Gather", "Link", "Scatter"]


class Link:
    """An exchange among ranks, and the sums on their way."""

    def __init__(self, exchange: Exchange, failures: Failures, buffers: int) -> None:
        self.exchange, self.failures, self._buffers = exchange, failures, buffers
        self.passes = 0  # backward passes that sent gradients
        self.waited = 0.0  # seconds
        self._pass = -1  # number of the backward pass that runs
        self._late: deque[Callable[[], None]] = deque()  # waits for sums of this backward pass

    def wait(self, future: Future[torch.Tensor]) -> None:
        """Wait on the host, or with the current stream. Raises the first failure, which names rank,
        peer and task; it ends the exchange, so that other ranks learn of it."""
        self.failures.refuse()
        start = time.perf_counter()
        try:
            wait_within(future, None, self.failures.look)
        except BaseException as error:
            raise self.fail(error) from error.__cause__
        self.waited += time.perf_counter() - start

    def fail(self, error: BaseException) -> BaseException:
        """End the exchange; return the error by which this rank ends."""
        self._late.clear()
        told, step = error, self.passes
        if isinstance(error, Exception):
            told = self.failures.explained(self.failures.not_begun(error, step), step)
        kept = self.failures.keep(told, f"step {step}")
        self.exchange.executor.abort(kept)
        return kept if isinstance(error, Exception) else error

    def begin_pass(self) -> None:
        """Note that a backward pass runs, at whose end all sums must be there."""
        number = compat.backward_id()
        if number != self._pass:
            self._finish()  # those of a pass that failed
            self._pass = number
            compat.call_after_backward(self._end_pass)

    def finish_later(self, finish: Callable[[], None]) -> None:
        """Call this before the backward pass ends, or earlier if too many others wait, too."""
        self._late.append(finish)
        while len(self._late) > self._buffers:
            self._late.popleft()()

    def _end_pass(self) -> None:
        self._finish()
        self._pass = -1
        self.passes += 1

    def _finish(self) -> None:
        while self._late:
            self._late.popleft()()


@dataclass
class Traffic:
    """Sums of bytes: of FSDP's tensors as this rank would send them natively."""

    gathered: int = 0
    reduced: int = 0


@dataclass
class _Comm:
    """A collective of one group of parameters. keys: codecs of its parameters, for an Exchange."""

    group: Group
    keys: Sequence[str]
    link: Link
    number: int  # of the group, among `groups`
    groups: int
    sent: Traffic

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for inputs and outputs, by torch's own allocator."""
        return torch.empty(*size, dtype=dtype, device=device)

    def pieces(self, chosen: Sequence[int]) -> list[Piece]:
        """Pieces of the rows: see [Note: rows]. chosen: positions of the parameters in a row."""
        row = [(self.group.lengths[index], self.keys[index]) for index in chosen]
        return [
            Piece(length, key, owner)
            for owner in range(self.group.ranks.size())
            for length, key in row
            if length
        ]

    def exchange(
        self, tensor: torch.Tensor, strategy: str, chosen: Sequence[int]
    ) -> Future[torch.Tensor]:
        """Start to exchange a tensor of rows, in place."""
        pieces, link = self.pieces(chosen), self.link
        link.failures.refuse()
        if sum(piece.length for piece in pieces) != tensor.numel():
            raise link.fail(SyncError(self._unknown(tensor, chosen)))
        name = f"{strategy} of {self.group.name}"
        if len(chosen) < len(self.group.lengths):
            name += f": parameters {', '.join(map(str, chosen))}"
        # forward and backward pass draw alike, groups differently
        draw = link.passes * self.groups + self.number
        try:
            with ordinary():
                return link.exchange.submit(tensor, strategy, pieces, name=name, draw=draw)
        except Exception as error:
            raise self._failed(error, chosen) from error.__cause__

    def _failed(self, error: Exception, chosen: Sequence[int]) -> BaseException:
        """The error of an exchange that could not begin."""
        named = self.link.fail(error)
        if len(chosen) < len(self.keys):
            named.add_note(
                f"only parameters {', '.join(map(str, chosen))} of {len(self.keys)} of "
                f"{self.group.name!r} have gradients here, and all ranks must use the same: see "
                "FSDPModule.set_reduce_scatter_unused_params"
            )
        return named

    def _unknown(self, tensor: torch.Tensor, chosen: Sequence[int]) -> str:
        return (
            f"FSDP2 of torch {torch.__version__} lays out {tensor.numel()} elements of "
            f"{self.group.name!r} in a way that hipress does not know (parameters {list(chosen)} "
            f"of {list(self.group.lengths)} elements a rank): hipress.detach the model"
        )


class Gather(_Comm):
    """Takes the place of FSDP2's all-gather: every rank, the sender too, gets the values that its
    payload decodes to."""

    native: Comm

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the rows of `output_tensor`, of which `input_tensor` is this rank's."""
        if group != self.group.ranks or output_tensor.dtype == torch.uint8:
            # ranks of a node, after a forward pass that kept parts of what all decoded; or 8 bits
            native: dist.Work | None = self.native(
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
                async_op=async_op,
            )
            return native
        self.sent.gathered += input_tensor.nbytes * (group.size() - 1)
        future = self.exchange(output_tensor, "pull", range(len(self.keys)))
        if output_tensor.device.type != "cpu":
            self.link.wait(future)  # by the current stream
            return None
        return _Gathered(self.link, future)


class _Gathered(dist.Work):
    """Parameters on their way."""

    def __init__(self, link: Link, future: Future[torch.Tensor]) -> None:
        super().__init__()
        self._link, self._future = link, future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until they are there; by hipress's own time-out."""
        self._link.wait(self._future)
        return True


class Scatter(_Comm):
    """Takes the place of FSDP2's reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum the rows of `input_tensor` at their owners; `output_tensor` gets this rank's."""
        self.sent.reduced += output_tensor.nbytes * (group.size() - 1)
        divisor, length = divisor_of(op, self.group), output_tensor.numel()
        self.link.begin_pass()
        future = self.exchange(input_tensor, "push", self.group.used)
        mine = input_tensor[length * group.rank() : length * (group.rank() + 1)]

        def finish() -> None:
            self.link.wait(future)
            torch.div(mine, divisor, out=output_tensor)

        if self.group.reads_late(output_tensor):
            self.link.finish_later(finish)
        else:
            finish()
