"""The report of a sharded model."""

from __future__ import annotations

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
    gradients: tuple[Decision, ...]  # (): FSDP2's own reduce-scatter
    weights: tuple[Decision, ...]  # (): FSDP2's own all-gather
    native_bytes: int  # that FSDP2 alone would have sent for the same collectives
    bytes_sent: int
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

    def __str__(self) -> str:
        parts = [f"hipress.shard, rank {self.rank} of {self.world_size}"]
        if not self.installed:
            parts[0] += ": nothing is installed for one rank"
        if self.installed and self.passes:
            parts.append(str(self._costs()))
        for what, decisions in (("Gradients", self.gradients), ("Weights", self.weights)):
            table = decision_table(decisions)
            table.title = what if decisions else f"{what}: by FSDP2's own collective"
            parts.append(str(table))
        return "\n\n".join(parts) + "\n"

    def _costs(self) -> Table:
        table = Table(
            f"Costs of a step on this rank, mean of {self.passes}",
            "FSDP2: sent natively for the same collectives. Times overlap with computation.",
        )
        table.add_columns([], ["FSDP2 MB", "sent MB", "encode ms", "decode ms", "waiting ms"])
        sizes = (f"{n / 1e6 / self.passes:.3f}" for n in (self.native_bytes, self.bytes_sent))
        spent = (self.encode_seconds, self.decode_seconds, self.wait_seconds)
        table.add_row(*sizes, *(f"{1e3 * seconds / self.passes:.1f}" for seconds in spent))
        return table
