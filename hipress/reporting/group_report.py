"""The report of a process group `hipress`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hipress.reporting.text_table import Table


@dataclass(frozen=True)
class Calls:
    """Collectives of one kind."""

    what: str
    why_not: str  # the reason why they went uncompressed; "" if compressed
    calls: int
    elements: int


@dataclass(frozen=True)
class GroupReport:
    """The collectives of a group so far, on this rank. Print it, or take `to_dict()`."""

    rank: int
    world_size: int
    compressor: str
    calls: tuple[Calls, ...]
    bytes_sent: int  # by compressed all-reduces
    passes: int  # backward passes that had some

    def scalars(self) -> dict[str, float]:
        """Means of a backward pass, for `hipress.integrations`; {} before one."""
        return {"hipress/bytes": self.bytes_sent / self.passes} if self.passes else {}

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists, numbers and texts."""
        return asdict(self)

    def __str__(self) -> str:
        table = Table(
            f"hipress group, rank {self.rank} of {self.world_size}: {self.compressor}",
            f"Compressed all-reduces sent {self.bytes_sent / 1e6:.3f} MB.",
        )
        table.add_columns(["collective", "compressed"], ["calls", "elements"])
        for each in self.calls:
            how = f"no: {each.why_not}" if each.why_not else "yes"
            table.add_row(each.what, how, f"{each.calls}", f"{each.elements:,}")
        return f"{table}\n"
