"""A way in of its own: averages of a module's buffers, by one bit with feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hipress.channel import Channel, Exchange, Piece

EVERY = 3  # steps


@dataclass(frozen=True)
class Report:
    """Averages so far, on this rank."""

    averages: int
    bytes_sent: int
    state_bytes: int
    wait_seconds: float


class BufferAverages:
    """Averages a module's floating-point buffers every third step."""

    def __init__(
        self,
        module: nn.Module,
        compressor: str = "onebit_group",
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> None:
        """All ranks of the group must call this, with equal arguments."""
        named = {n: b for n, b in module.named_buffers() if b.is_floating_point() and b.numel()}
        self._buffers, self.steps = list(named.values()), 0
        self._channel = Channel.of(process_group, "buffers", timeout=timeout)
        key = self._channel.add(compressor)
        pieces = tuple(Piece(b.numel(), key, "ps", name=name) for name, b in named.items())
        self._exchange = self._channel.with_states(Exchange("buffers", pieces))
        self.detach = self._channel.close

    @torch.no_grad()
    def step(self) -> None:
        """Count a step, and average after every third. Raises RankLost, AgreementTimeout or
        SyncError, which name rank, peer and task."""
        self.steps += 1
        if self.steps % EVERY:
            return
        flat = torch.cat([buffer.flatten().float() for buffer in self._buffers])
        self._channel.wait(self._channel.submit(flat, self._exchange, draw=self.steps), self.steps)
        lengths = [buffer.numel() for buffer in self._buffers]
        for buffer, values in zip(self._buffers, flat.split(lengths), strict=True):
            buffer.copy_(values.view(buffer.shape))

    def undelivered(self) -> torch.Tensor:
        """Values that this rank has not delivered yet: flat float32."""
        names = [piece.name for piece in self._exchange.pieces]
        pieces = [self._channel.states.undelivered(name) for name in names]
        return torch.cat([piece for piece in pieces if piece is not None])

    def report(self) -> Report:
        """Averages, bytes and waits so far."""
        return Report(
            self.steps // EVERY,
            round(self._channel.counters.wire_bytes),
            self._channel.states.nbytes,
            self._channel.waited,
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of steps and this rank's residuals, by buffer."""
        return self._channel.record("averages of buffers", self.steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, bit for bit. Raises StateError for that of another module."""
        self.steps = self._channel.take_record(state, "averages of buffers")
