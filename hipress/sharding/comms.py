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

from casync.runtime.deferral import as_torch
from hipress import compat
from hipress.engine.exchange import Exchange, Piece
from hipress.engine.failures import Failures
from hipress.engine.futures import wait_within
from hipress.errors import SyncError
from hipress.model.torch_modes import without_inference_mode
from hipress.ranks.coordinator import Coordinator
from hipress.sharding.fsdp import Group, divisor_of

__all__ = ["Average", "Backward", "Gather", "Link", "Scatter", "Traffic"]


class Backward:
    """The backward pass that runs, and the sums that may arrive until its end."""

    def __init__(self, buffers: int) -> None:
        self.count = 0  # passes so far that sent gradients
        self._buffers = buffers
        self._number: int | None = None  # torch's, of the pass that runs
        self._late: deque[Callable[[], None]] = deque()

    def begin(self) -> None:
        """Note that a pass runs, at whose end all sums must be there. May repeat."""
        number = compat.backward_id()
        if number != self._number:
            self.finish()  # those of the pass around this one, or of one that failed
            self._number = number
            compat.call_after_backward(self._end)

    def finish_later(self, finish: Callable[[], None]) -> None:
        """Call this before the pass ends, or earlier if too many others wait, too."""
        self._late.append(finish)
        while len(self._late) > self._buffers:
            self._late.popleft()()

    def _end(self) -> None:
        self.finish()
        self._number = None
        self.count += 1

    def finish(self) -> None:
        """Wait for all sums; also before FSDP adds to a gradient, whose sum may be among them."""
        while self._late:
            self._late.popleft()()


class Link:
    """An exchange among ranks, with its failures."""

    def __init__(
        self, ranks: Coordinator, exchange: Exchange, failures: Failures, backward: Backward
    ) -> None:
        self.ranks = ranks
        self.exchange, self.failures, self.backward = exchange, failures, backward
        self.waited = 0.0  # seconds

    @property
    def state_bytes(self) -> int:
        """Memory of the codecs' states."""
        codec_states = (
            each for states in self.exchange.states.values() for each in states.values()
        )
        return sum(as_torch(array).nbytes for state in codec_states for array in state.values())

    def wait(self, future: Future[torch.Tensor]) -> None:
        """Wait on the host, or with the current stream. Raises the first failure, which names rank,
        peer and task; it ends the exchange, so that other ranks learn of it."""
        self.failures.refuse()
        start = time.perf_counter()
        try:
            wait_within(future, None, self.failures.refuse_gone)
        except BaseException as error:
            raise self.fail(error) from error.__cause__
        self.waited += time.perf_counter() - start

    def fail(self, error: BaseException) -> BaseException:
        """End the exchange; return the error by which this rank ends."""
        named, step = error, self.backward.count
        if isinstance(error, Exception):
            named = self.failures.explain(self.failures.not_begun(error, step), step)
        recorded = self.failures.record(named, f"step {step}")
        self.exchange.executor.abort(recorded)
        return recorded if isinstance(error, Exception) else error


@dataclass
class Traffic:
    """Bytes that FSDP alone would have sent for the same collectives, in floats of their types."""

    native: int = 0


@dataclass(eq=False)
class _Comm:
    """A collective of one group of parameters. keys: codecs of its parameters, for an Exchange."""

    group: Group
    keys: Sequence[str]
    link: Link
    number: int  # of the group, among `groups`
    groups: int
    sent: Traffic
    strategy: str

    @without_inference_mode()
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for inputs and outputs, by torch's own allocator; threads write to it."""
        return torch.empty(*size, dtype=dtype, device=device)

    @property
    def name(self) -> str:
        """Name of the exchange, the same on all ranks."""
        return f"{self.strategy} of {self.group.name}"

    def rows(self, chosen: Sequence[int]) -> list[Piece]:
        """Pieces of all rows: see [Note: rows]. chosen: positions of the parameters in a row."""
        row, owners = self.row(chosen), range(self.group.ranks.size())
        return [Piece(each.length, each.codec, owner) for owner in owners for each in row]

    def row(self, chosen: Sequence[int]) -> list[Piece]:
        """Pieces of a row, with their places among all parameters."""
        lengths, starts = self.group.lengths, self.group.starts
        return [
            Piece(lengths[index], self.keys[index], place=(index, starts[index]))
            for index in chosen
            if lengths[index]
        ]

    def exchange(
        self,
        tensor: torch.Tensor,
        pieces: list[Piece],
        chosen: Sequence[int],
        *,
        feedback: bool = False,
    ) -> Future[torch.Tensor]:
        """Start to exchange a tensor of rows, or a row, in place."""
        link = self.link
        link.failures.refuse()
        if sum(piece.length for piece in pieces) != tensor.numel():
            raise link.fail(SyncError(self._unknown(tensor, chosen)))
        name = self.name
        if len(chosen) < len(self.group.lengths) and not feedback:
            name += f": parameters {', '.join(map(str, chosen))}"
        # forward and backward pass draw alike, groups differently
        draw = link.backward.count * self.groups + self.number
        try:
            with without_inference_mode():
                return link.exchange.submit(
                    tensor, self.strategy, pieces, name=name, feedback=feedback, draw=draw
                )
        except Exception as error:
            raise self._fail(error, chosen) from error.__cause__

    def _fail(self, error: Exception, chosen: Sequence[int]) -> BaseException:
        """End the exchange that could not begin; return the error."""
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
            native: dist.Work | None = self.group.before[0](
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
                async_op=async_op,
            )
            return native
        self.sent.native += input_tensor.nbytes * (group.size() - 1)
        chosen = range(len(self.keys))
        future = self.exchange(output_tensor, self.rows(chosen), chosen)
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
        self.sent.native += output_tensor.nbytes * (group.size() - 1)
        divisor, length = divisor_of(op, self.group), output_tensor.numel()
        used = self.group.used
        future = self.exchange(input_tensor, self.rows(used), used)
        mine = input_tensor[length * group.rank() : length * (group.rank() + 1)]

        def finish() -> None:
            self.link.wait(future)
            torch.div(mine, divisor, out=output_tensor)

        if self.group.reads_late(output_tensor) and not self.group.hooked:
            self.link.backward.finish_later(finish)
        else:
            self.link.backward.finish()
            finish()


@dataclass(eq=False)
class Average(_Comm):
    """An all-reduce hook of FSDP2: averages a rank's shards of gradients over replicas."""

    partial: torch.Tensor | None = None  # of backward passes that are not averaged

    def __post_init__(self) -> None:
        """Have states for all parameters, of which a backward pass may leave some out."""
        self.link.exchange.reserve(self.name, len(self.keys), sum(self.group.lengths))

    def __call__(self, reduce_output: torch.Tensor) -> None:
        """Average the output of a reduce-scatter, in place."""
        if not self.group.averages:  # by set_requires_all_reduce(False)
            before = self.partial
            self.partial = reduce_output.clone() if before is None else before + reduce_output
            reduce_output.zero_()
            return
        if self.partial is not None:
            reduce_output += self.partial
            self.partial = None
        ranks, used = len(self.link.ranks.ranks), self.group.used
        self.sent.native += round(2 * (ranks - 1) / ranks * reduce_output.nbytes)
        future = self.exchange(reduce_output, self.row(used), used, feedback=True)
        if self.group.reads_late(reduce_output):
            self.link.backward.finish_later(lambda: self.link.wait(future))
        else:
            self.link.backward.finish()
            self.link.wait(future)
