"""Reports of a model: its choices, and their costs so far: `hipress.report(ddp)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hipress.choose.plan import Decision
from hipress.choose.trial import Tried
from hipress.reporting import tables
from hipress.reporting.measured import Measured, all_reduce_bytes

if TYPE_CHECKING:
    from hipress.choose.probe import Probe


@dataclass(frozen=True)
class Report:
    """Choices and costs. Print it, or take `to_dict()`."""

    rank: int
    world_size: int
    installed: bool
    why: str
    options: Mapping[str, Any]
    decisions: tuple[Decision, ...]
    measured: Measured | None  # since an optimizer froze, if one has
    probe: Probe | None
    cuts: Mapping[str, bool] = field(default_factory=dict)  # True for codecs that take a capacity
    tried: tuple[Tried, ...] = ()  # by "auto", in the last trial
    trial_seconds: float | None = None  # cost of the last trial; None before its end
    before_freeze: Measured | None = None  # of the steps until an optimizer froze
    capture: str = ""  # use of CUDA graphs, and why there is none; "" without NCCL

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far; 0 if nothing is installed that counts them."""
        return sum(round(m.wire_bytes * m.steps) for m in (self.before_freeze, self.measured) if m)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank sends in a step; DDP's float32 all-reduce if untouched."""
        if self.measured is not None:
            return self.measured.wire_bytes
        return all_reduce_bytes(sum(d.numel for d in self.decisions), self.world_size)

    def scalars(self) -> dict[str, float]:
        """Means of a step by name, for `hipress.integrations`; {} before a step."""
        measured = self.measured
        if measured is None:
            return {}
        return {
            "hipress/bytes": measured.wire_bytes,
            "hipress/share_of_ddp": measured.wire_bytes / max(measured.ddp_wire_bytes, 1.0),
            "hipress/encode_ms": 1e3 * measured.encode_seconds,
            "hipress/decode_ms": 1e3 * measured.decode_seconds,
            "hipress/exposed_ms": 1e3 * measured.exposed_seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists, numbers and texts."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "installed": self.installed,
            "why": self.why,
            "bytes_sent": self.bytes_sent,
            "bytes_per_step": self.bytes_per_step,
            "options": dict(self.options),
            "decisions": [asdict(d) for d in self.decisions],
            "measured": None if self.measured is None else asdict(self.measured),
            "probe": None if self.probe is None else self.probe.to_dict(),
            "cuts": dict(self.cuts),
            "tried": [asdict(each) for each in self.tried],
            "trial_seconds": self.trial_seconds,
            "before_freeze": None if self.before_freeze is None else asdict(self.before_freeze),
            "capture": self.capture,
        }

    def __str__(self) -> str:
        more = f"; {self.capture}" if self.capture else ""
        parts = [f"hipress, rank {self.rank} of {self.world_size}: {self.why}{more}"]
        if self.before_freeze is not None:
            parts.append(str(tables.sent_table(self.before_freeze, "before the freeze")))
        if self.measured is not None:
            since = "since the freeze" if self.before_freeze is not None else ""
            parts.append(str(tables.sent_table(self.measured, since)))
            if self.measured.unused_bytes:
                parts.append(str(tables.room_table(self.measured, self.cuts)))
        parts.append(str(tables.decision_table(self.decisions)))
        if self.measured is not None:
            parts.append(str(tables.time_table(self.measured)))
        if self.tried:
            parts.append(str(tables.tried_table(self.tried, self.trial_seconds)))
        if self.probe is not None:
            parts.append(str(tables.probe_table(self.probe)))
        return "\n\n".join(parts) + "\n"
