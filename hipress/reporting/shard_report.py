"""The report of a sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hipress.choose.plan import Decision
from hipress.reporting.tables import decision_table
from hipress.reporting.text_table import Table


@dataclass(frozen=True)
class ShardReport:
    """Choices and costs of `hipress.shard`, on this rank. Print it, or take `to_dict()`."""

    rank: int
    world_size: int  # of the shards
    installed: bool
    steps: int  # in this process; backward passes between two changes of the weights are one
    passes: int  # backward passes in this process that sent gradients
    decisions: Mapping[str, tuple[Decision, ...]]  # by argument of `shard`
    native_bytes: int  # that FSDP2 alone would have sent for the same collectives
    left_bytes: int  # of these, sent uncompressed by its own collectives
    bytes_sent: int  # by hipress
    state_bytes: int  # memory of the codecs' states
    encode_seconds: float
    decode_seconds: float
    wait_seconds: float  # the host waited for values

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank sends in a step, also those of FSDP2's own collectives."""
        return (self.bytes_sent + self.left_bytes) / max(1, self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists, numbers and texts."""
        return {**asdict(self), "bytes_per_step": self.bytes_per_step}

    def scalars(self) -> dict[str, float]:
        """Means of a step by name, for `hipress.integrations`; {} before a step."""
        if not (self.installed and self.steps):
            return {}
        sent = self.bytes_sent + self.left_bytes
        return {
            "hipress/bytes": self.bytes_per_step,
            "hipress/share_of_fsdp": sent / max(self.native_bytes, 1),
            "hipress/encode_ms": 1e3 * self.encode_seconds / self.steps,
            "hipress/decode_ms": 1e3 * self.decode_seconds / self.steps,
            "hipress/exposed_ms": 1e3 * self.wait_seconds / self.steps,
        }

    def __str__(self) -> str:
        parts = [f"hipress.shard, rank {self.rank} of {self.world_size}"]
        if not self.installed:
            parts[0] += ": nothing is installed for one rank"
        if self.installed and self.steps:
            parts.append(str(self._costs()))
        for argument, decisions in self.decisions.items():
            table = decision_table(decisions)
            table.title = f"{argument}: elements of this rank's shards"
            parts.append(str(table))
        return "\n\n".join(parts) + "\n"

    def _costs(self) -> Table:
        table = Table(
            f"Costs of a step on this rank, mean of {self.steps}",
            "FSDP2: sent by it alone for the same collectives. left: of these, sent by its own. "
            "states: memory of compressors. Times overlap with computation.",
        )
        table.add_columns([], ["FSDP2 MB", "left MB", "sent MB", "states MB"])
        table.add_columns([], ["encode ms", "decode ms", "waiting ms"])
        sent = (self.native_bytes, self.left_bytes, self.bytes_sent)
        spent = (self.encode_seconds, self.decode_seconds, self.wait_seconds)
        sizes = [f"{n / 1e6 / self.steps:.3f}" for n in sent]
        times = [f"{1e3 * seconds / self.steps:.1f}" for seconds in spent]
        table.add_row(*sizes, f"{self.state_bytes / 1e6:.3f}", *times)
        return table
