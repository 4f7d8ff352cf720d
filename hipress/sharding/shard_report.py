"""The report of a sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hipress.plan.plan import Decision
from hipress.reporting.tables import decision_table
from hipress.reporting.text_table import Table


@dataclass(frozen=True)
class ShardReport:
    """Choices and costs of `hipress.shard`, on this rank. Print it, or take `to_dict()`."""

    rank: int
    world_size: int  # of the shards
    installed: bool
    passes: int  # backward passes that sent gradients
    decisions: Mapping[str, tuple[Decision, ...]]  # by argument of `shard`
    native_bytes: int  # that FSDP2 alone would have sent for the same collectives
    bytes_sent: int
    state_bytes: int  # memory of the codecs' states
    encode_seconds: float
    decode_seconds: float
    wait_seconds: float  # the host waited for values

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank sends in a step: a backward pass that sends gradients."""
        return self.bytes_sent / max(1, self.passes)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists, numbers and texts."""
        return {**asdict(self), "bytes_per_step": self.bytes_per_step}

    def scalars(self) -> dict[str, float]:
        """Means of a step by name, for `hipress.integrations`; {} before a step."""
        if not (self.installed and self.passes):
            return {}
        return {
            "hipress/bytes": self.bytes_per_step,
            "hipress/share_of_fsdp": self.bytes_sent / max(self.native_bytes, 1),
            "hipress/encode_ms": 1e3 * self.encode_seconds / self.passes,
            "hipress/decode_ms": 1e3 * self.decode_seconds / self.passes,
            "hipress/exposed_ms": 1e3 * self.wait_seconds / self.passes,
        }

    def __str__(self) -> str:
        parts = [f"hipress.shard, rank {self.rank} of {self.world_size}"]
        if not self.installed:
            parts[0] += ": nothing is installed for one rank"
        if self.installed and self.passes:
            parts.append(str(self._costs()))
        for argument, decisions in self.decisions.items():
            table = decision_table(decisions)
            table.title = argument
            parts.append(str(table))
        return "\n\n".join(parts) + "\n"

    def _costs(self) -> Table:
        table = Table(
            f"Costs of a step on this rank, mean of {self.passes}",
            "FSDP2: sent natively for the same collectives. states: memory of compressors. Times "
            "overlap with computation.",
        )
        table.add_columns(
            [], ["FSDP2 MB", "sent MB", "states MB", "encode ms", "decode ms", "waiting ms"]
        )
        sizes = (f"{n / 1e6 / self.passes:.3f}" for n in (self.native_bytes, self.bytes_sent))
        states = f"{self.state_bytes / 1e6:.3f}"
        spent = (self.encode_seconds, self.decode_seconds, self.wait_seconds)
        table.add_row(*sizes, states, *(f"{1e3 * seconds / self.passes:.1f}" for seconds in spent))
        return table
