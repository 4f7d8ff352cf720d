"""The costs of an outer loop so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class OuterReport:
    """Counts and costs since an Outer was made; print it, or take its `to_dict()`."""

    sites: int  # in the last round, but for those that left with it
    rounds: int
    undone: int  # rounds that failed, and were undone
    seconds: float
    stalled: float  # of these, in which the site did not train, but was in step()
    sent_bytes: int
    memory: dict[str, int]  # bytes at this site beside weights and optimizer, by use
    schedule: str
    names: list[str]  # of the sites, such as "site 3 (amsterdam)"
    ended: str = ""  # the reason why there are no more rounds

    @property
    def training(self) -> float:
        """Share of the time in which the site trained."""
        return 1 - self.stalled / self.seconds if self.seconds else 1.0

    def scalars(self) -> dict[str, float]:
        """Figures by name, for `hipress.integrations`; {} before a round."""
        if self.rounds < 1:
            return {}
        return {
            "hipress/bytes": self.sent_bytes / self.rounds,
            "hipress/training": self.training,
            "hipress/sites": self.sites,
            "hipress/rounds": self.rounds,
            "hipress/undone": self.undone,
        }

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self) | {"training": self.training}

    def __str__(self) -> str:
        used = ", ".join(f"{use} {size / 1e6:.1f}" for use, size in self.memory.items() if size)
        ended = f" that has ended ({self.ended})" if self.ended else f" of {self.sites} sites"
        return (
            f"outer loop{ended}: {self.schedule}\n"
            + (f"  {', '.join(self.names)}\n" if self.names else "")
            + f"  {self.rounds} rounds, {self.undone} undone, {self.sent_bytes / 1e6:.1f} MB sent\n"
            f"  {100 * self.training:.1f}% of {self.seconds:.1f} s in training\n"
            f"  MB beside weights and optimizer: {used}"
        )
