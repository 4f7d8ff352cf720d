"""FSDP2's collectives, compressed: the objects that take the place of its own.

[Note: order on the host] FSDP2 orders its collectives by CUDA streams and ignores the Work of a
reduce-scatter. So on a device each waits at once, which makes the current stream wait, not the
host. The CPU has no streams: there an all-gather returns a Work, for which FSDP2 waits before it
uses the parameters, and a sum may arrive until the backward pass is over, as long as FSDP2 only
makes views of the output (`Group.reads_late`). At most `buffers` inputs wait so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.raw import RAW
from hipress import compat
from hipress.channel.channel import Channel
from hipress.channel.exchange import Exchange, Piece, rows
from hipress.channel.futures import average
from hipress.engine.scaling import Scale, scale_back, unscaled
from hipress.errors import SyncError
from hipress.model.params import COMPRESSIBLE
from hipress.model.torch_modes import without_inference_mode
from hipress.sharding.fsdp import Group, divisor_of

__all__ = ["Backward", "Connection", "Gather", "ReplicaAverage", "Scatter", "ShardTraffic"]


@dataclass
class ShardTraffic:
    """Sums of this process."""

    steps: int = 0  # backward passes between two changes of the weights count as one
    passes: int = 0  # backward passes that sent gradients; nested ones belong to the outermost
    native: int = 0  # bytes that FSDP alone would have sent for the same collectives
    left: int = 0  # of these, bytes of collectives that are left to it


class Backward:
    """The backward pass that runs, and the sums that may arrive until its end."""

    def __init__(self, buffers: int, groups: Collection[Group]) -> None:
        """groups: of all parameters of the model."""
        self.traffic = ShardTraffic()
        self.passes = self.sums = 0  # so far, also before a state was loaded
        self.connections: list[Connection] = []
        self._buffers, self._groups = buffers, groups
        self._number: int | None = None  # torch's, of the pass that runs, maybe within another
        self._running = False
        self._writes: int | None = None  # to the weights, when the latest step began
        self._scale = Scale()
        self._scaled: float | None = None  # in the pass that runs, once it was asked for
        self._late: deque[Callable[[], None]] = deque()

    def begin(self) -> None:
        """Note that a pass runs, at whose end all sums must be there. May repeat."""
        number = compat.backward_id()
        if number == self._number:
            return
        self.finish()  # those of the pass around this one, or of one that failed
        self._number = number
        compat.call_after_backward(self._end)
        writes = sum(group.writes for group in self._groups)
        if writes != self._writes or not self._running:
            self.traffic.steps += writes != self._writes
            self.traffic.passes += 1
            self.passes += 1
            self._writes, self._running, self._scaled = writes, True, None

    def draw(self) -> int:
        """Number by which the next sum draws: the same on all ranks, and none like another."""
        self.sums += 1
        return self.sums - 1

    @property
    def scale(self) -> float:
        """The scale of this pass's gradients: see [Note: scale] in engine/scaling.py."""
        if self._scaled is None:  # the host waits for a device
            parameters = [each for group in self._groups for each in group.parameters]
            self._scaled = self._scale.now(parameters)
        return self._scaled

    @property
    def step(self) -> int:
        """Number of the present step in this process, from 0 on."""
        return self.traffic.steps - self._running

    def finish_later(self, finish: Callable[[], None]) -> None:
        """Call this before the pass ends, or earlier if too many others wait, too."""
        self._late.append(finish)
        while len(self._late) > self._buffers:
            self._late.popleft()()

    def _end(self) -> None:
        self.finish()
        self._number = None
        if not any(group.in_backward for group in self._groups):  # no pass around this one
            self._running = False
            for connection in self.connections:
                connection.settle()

    def finish(self) -> None:
        """Wait for all sums; also before FSDP adds to a gradient, whose sum may be among them."""
        while self._late:
            self._late.popleft()()

    def drop(self) -> None:
        """Forget a pass that failed, after its sums have arrived."""
        self.finish()
        self._number, self._running = None, False


class Connection:
    """The channel of some collectives, and the backward pass in which they run."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup, backward: Backward) -> None:
        """group: of the channel's ranks, for what is not compressed."""
        self.channel, self.group, self.backward = channel, group, backward
        self.used: dict[str, str] = {}  # parameters of the latest sums, by name of the exchange
        backward.connections.append(self)

    def wait(self, future: Future[torch.Tensor]) -> None:
        """Wait, as Channel.wait does."""
        with self._noted():
            self.channel.wait(future, self.backward.step)

    def settle(self) -> None:
        """Wait for a device, as Channel.settle_in does."""
        with self._noted():
            self.channel.settle_in(self.backward.step)

    def fail(self, error: BaseException) -> BaseException:
        """End the channel; return the error by which this rank ends."""
        failed = self.channel.failures.fail(error, self.backward.step)
        self._note_used(failed)
        return failed

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note_used(error)
            raise

    def _note_used(self, error: BaseException) -> None:
        """Tell of the parameters with gradients if ranks exchange those of others."""
        text = str(error)
        for name, used in self.used.items():
            if f"to exchange '{name}" in text or f"'{name}: parameters " in text:
                error.add_note(
                    f"{used} have gradients here, and all ranks must use the same: see "
                    "FSDPModule.set_reduce_scatter_unused_params"
                )


@dataclass(eq=False)
class _Comm:
    """A collective of one group of parameters."""

    group: Group
    names: Sequence[str]  # of its parameters
    keys: Sequence[str]  # of their codecs
    connection: Connection
    number: int  # of the group, among `groups`
    groups: int
    strategy: str
    leave: Callable[[str], None]  # called with the reason why a collective is not compressed
    _taken: dict[torch.dtype, bool] = field(default_factory=dict)
    _exchanges: dict[tuple[int, ...], Exchange] = field(default_factory=dict)

    def takes(self, kind: torch.dtype) -> bool:
        """True if the channel takes tensors of this type; if not, torch's own collective does."""
        if kind not in self._taken:
            why = self.why_left(kind)
            self._taken[kind] = not why and self.compresses
            if why:
                self.leave(why)
        return self._taken[kind]

    @property
    def compresses(self) -> bool:
        """True if one of the parameters has a codec."""
        return any(key != RAW for key in self.keys)

    def why_left(self, kind: torch.dtype) -> str:
        """The reason why tensors of this type are not compressed; "" if they are."""
        return (
            "" if kind in COMPRESSIBLE else f"type {kind} is not compressed".replace("torch.", "")
        )

    @property
    def traffic(self) -> ShardTraffic:
        """Sums of this process."""
        return self.connection.backward.traffic

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

    def exchange_of(self, chosen: tuple[int, ...]) -> Exchange:
        """The exchange of some parameters, by their positions in a row."""
        if chosen not in self._exchanges:
            name = self.name
            if len(chosen) < len(self.keys):
                name += f": parameters {', '.join(map(str, chosen))}"
            self._exchanges[chosen] = Exchange(name, self.pieces(chosen))
        return self._exchanges[chosen]

    def pieces(self, chosen: Sequence[int]) -> tuple[Piece, ...]:
        """Pieces of all rows: see [Note: rows]."""
        return rows(self.row(chosen), self.group.ranks.size())

    def row(self, chosen: Sequence[int]) -> tuple[Piece, ...]:
        """Pieces of a row."""
        lengths = self.group.lengths
        return tuple(
            Piece(lengths[index], self.keys[index], self.strategy)
            for index in chosen
            if lengths[index]
        )

    def exchange(
        self, tensor: torch.Tensor, chosen: tuple[int, ...], draw: int
    ) -> Future[torch.Tensor]:
        """Start to exchange a tensor of rows, or a row, in place. draw: see Channel.submit."""
        connection = self.connection
        connection.channel.failures.refuse()
        exchange = self.exchange_of(chosen)
        if exchange.elements != tensor.numel():
            raise connection.fail(SyncError(self._unknown(tensor, chosen)))
        try:
            with without_inference_mode():
                return connection.channel.submit(tensor, exchange, draw=draw)
        except Exception as error:
            raise connection.fail(error) from error.__cause__

    def reduce(self, tensor: torch.Tensor, chosen: tuple[int, ...]) -> Future[torch.Tensor]:
        """Start to exchange gradients, as they are without the scale of a GradScaler."""
        backward = self.connection.backward
        draw, scale = backward.draw(), backward.scale
        numbers = ", ".join(map(str, chosen))
        used = f"parameters {numbers} of {len(self.keys)} of {self.group.name!r}"
        self.connection.used[self.name] = used
        if scale == 1:
            return self.exchange(tensor, chosen, draw)
        future = self.exchange(unscaled(scale, tensor), chosen, draw)
        return scale_back(scale, future, self.connection.channel.memory.future(), tensor)

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
        sent = input_tensor.nbytes * (group.size() - 1)
        self.traffic.native += sent
        # the first: ranks of a node, after a forward pass that kept parts of what all decoded
        if group != self.group.ranks or not self.takes(output_tensor.dtype):
            self.traffic.left += sent
            native: dist.Work | None = self.group.before[0](
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
                async_op=async_op,
            )
            return native
        chosen = tuple(range(len(self.keys)))
        draw = self.group.version() * self.groups + self.number  # see [Note: weights] in fsdp.py
        future = self.exchange(output_tensor, chosen, draw)
        if output_tensor.device.type != "cpu":
            self.connection.wait(future)  # by the current stream
            return None
        return _Gathered(self.connection, future)

    def why_left(self, kind: torch.dtype) -> str:
        """Implements _Comm.why_left. Bits of frozen 16-bit weights may be no numbers, but packed
        ones of 4 bits, and uncompressed parts of a row travel as float32."""
        if self.group.gathered == torch.uint8:
            return "FSDP2 gathers it as bytes: of several types, or by fsdp_pre_all_gather"
        kept = zip(self.group.frozen, self.group.parameters, self.keys, strict=True)
        if any(still and p.dtype.itemsize < 4 and key == RAW for still, p, key in kept):
            return "frozen 16-bit weights, whose bits must stay"
        return super().why_left(kind)


class _Gathered(dist.Work):
    """Parameters on their way."""

    def __init__(self, connection: Connection, future: Future[torch.Tensor]) -> None:
        super().__init__()
        self._connection, self._future = connection, future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until they are there; by hipress's own time-out."""
        self._connection.wait(self._future)
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
        sent = output_tensor.nbytes * (group.size() - 1)
        self.traffic.native += sent
        if not self.takes(input_tensor.dtype):
            self.traffic.left += sent
            self.connection.backward.finish()
            self.group.before[1](
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
                op=op,
                async_op=async_op,
            )
            return
        divisor, length = divisor_of(op, self.group), output_tensor.numel()
        future = self.reduce(input_tensor, self.group.used)
        mine = input_tensor[length * group.rank() : length * (group.rank() + 1)]

        def finish() -> None:
            self.connection.wait(future)
            torch.div(mine, divisor, out=output_tensor)

        if self.group.reads_late(output_tensor) and not self.group.hooked:
            self.connection.backward.finish_later(finish)
        else:
            self.connection.backward.finish()
            finish()


@dataclass(eq=False)
class ReplicaAverage(_Comm):
    """An all-reduce hook of FSDP2: averages a rank's shards of gradients over replicas."""

    def __post_init__(self) -> None:
        """Have states for all parameters, of which a backward pass may leave some out."""
        indices = [index for index, length in enumerate(self.group.lengths) if length]
        named = zip(self.row(indices), indices, strict=True)
        row = tuple(replace(each, name=self.names[i], number=i) for each, i in named)
        self._whole = self.connection.channel.with_states(Exchange(self.name, row))
        self._by_index = dict(zip(indices, self._whole.pieces, strict=True))

    def exchange_of(self, chosen: tuple[int, ...]) -> Exchange:
        """Implements _Comm.exchange_of: some pieces of the whole, with their states."""
        if chosen not in self._exchanges:
            pieces = tuple(self._by_index[i] for i in chosen if i in self._by_index)
            self._exchanges[chosen] = replace(self._whole, pieces=pieces)
        return self._exchanges[chosen]

    def __call__(self, reduce_output: torch.Tensor) -> None:
        """Average the output of a reduce-scatter, in place."""
        group, connection = self.group, self.connection
        pieces = torch.split(reduce_output, [group.lengths[index] for index in group.used])
        by_index = dict(zip(group.used, pieces, strict=True))
        if not group.averages:  # by set_requires_all_reduce(False)
            for index, piece in by_index.items():
                held = group.held.get(index)
                group.held[index] = piece.clone() if held is None else held + piece
            reduce_output.zero_()
            return
        for index in group.held.keys() & by_index.keys():
            by_index[index].add_(group.held.pop(index))
        ranks = len(connection.channel.coordinator.ranks)
        self.traffic.native += round(2 * (ranks - 1) / ranks * reduce_output.nbytes)
        if self.takes(reduce_output.dtype):
            future = self.reduce(reduce_output, group.used)
        else:
            future = average(reduce_output, connection.group)
        if group.reads_late(reduce_output):
            connection.backward.finish_later(partial(connection.wait, future))
        else:
            connection.backward.finish()
            connection.wait(future)

    @property
    def compresses(self) -> bool:
        """True, as no other collective averages the replicas."""
        return True
