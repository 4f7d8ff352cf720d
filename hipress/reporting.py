"""What hipress does to a model, and what it cost so far: `hipress.report(ddp)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hipress.plan.rules import Decision, Plan

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from casync.runtime.counters import Counters
    from hipress.plan.probe import Probe
    from hipress.sync.engine import Traffic

SHOWN = 40  # parameters in the table


@dataclass(frozen=True)
class Measured:
    """Per step, on this rank, averaged over the steps of this process."""

    steps: int
    gradient_bytes: float  # as DDP would have reduced them
    payload_bytes: float  # of the messages that we send to peers
    spared_bytes: float  # of these, blocks that repeat and so do not travel
    wire_bytes: float  # sent by this rank in all, native all-reduces included
    fp32_wire_bytes: float  # what this rank would send with float32 all-reduce
    encode_seconds: float
    decode_seconds: float
    wait_seconds: float  # our compute lane idle while buckets were under way
    exposed_seconds: float  # the backward pass was over and waited for buckets


@dataclass(frozen=True)
class Report:
    """Choices and costs. Print it, or take `to_dict()`."""

    rank: int
    world_size: int
    installed: bool
    why: str
    options: Mapping[str, Any]
    decisions: tuple[Decision, ...]
    measured: Measured | None
    probe: Probe | None

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent so far; 0 where nothing is installed to count them."""
        return 0 if self.measured is None else round(self.measured.wire_bytes * self.measured.steps)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank sends in a step; DDP's float32 all-reduce if untouched."""
        if self.measured is not None:
            return self.measured.wire_bytes
        return all_reduce_bytes(sum(d.numel for d in self.decisions), self.world_size)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries, lists, numbers and texts."""
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
        }

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        console = Console(file=StringIO(), width=110)
        console.print(self)
        text = console.file
        assert isinstance(text, StringIO)
        return text.getvalue()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield f"[bold]hipress[/bold], rank {self.rank} of {self.world_size}: {self._headline()}"
        yield _decision_table(self.decisions)
        if self.measured is not None:
            yield _measured_table(self.measured)
        if self.probe is not None:
            yield _probe_table(self.probe)

    def _headline(self) -> str:
        if self.installed:
            return self.why
        return f"nothing installed, DDP's own all-reduce remains ({self.why})"


def measure_of(
    traffic: Traffic, counters: Counters, world_size: int, numel: int
) -> Measured | None:
    """Averages per step from an engine's counts; None before the first step."""
    steps = traffic.steps
    if steps == 0:
        return None
    return Measured(
        steps=steps,
        gradient_bytes=traffic.gradient_bytes / steps,
        payload_bytes=counters.bytes_sent / steps,
        spared_bytes=counters.bytes_spared / steps,
        wire_bytes=(counters.wire_bytes + share(world_size) * traffic.raw_bytes) / steps,
        fp32_wire_bytes=all_reduce_bytes(numel, world_size),
        encode_seconds=counters.encode_seconds / steps,
        decode_seconds=counters.decode_seconds / steps,
        wait_seconds=counters.wait_seconds / steps,
        exposed_seconds=traffic.exposed_seconds / steps,
    )


def share(world_size: int) -> float:
    """Bytes that a rank sends in an all-reduce, per byte of data."""
    return 2 * (world_size - 1) / world_size


def all_reduce_bytes(numel: int, world_size: int) -> float:
    """What a rank sends to average `numel` float32 numbers natively."""
    return share(world_size) * 4 * numel


def describe_plan(plan: Plan) -> str:
    """One line: how much of the model is compressed, and why."""
    total = sum(d.numel for d in plan.decisions)
    done = sum(d.numel for d in plan.decisions if d.codec is not None)
    count = sum(d.codec is not None for d in plan.decisions)
    share = done / total if total else 0.0
    return (
        f"{count} of {len(plan.decisions)} parameters compressed "
        f"({share:.1%} of the elements); {plan.why}"
    )


def _decision_table(decisions: tuple[Decision, ...]) -> Table:
    from rich.table import Table

    table = Table(title="Plan, largest first", title_justify="left")
    for name, side in (
        ("parameter", "left"), ("elements", "right"), ("codec", "left"), ("strategy", "left"),
        ("parts", "right"), ("raw ms", "right"), ("chosen ms", "right"), ("why", "left"),
    ):  # fmt: skip
        table.add_column(name, justify="right" if side == "right" else "left")
    ordered = sorted(decisions, key=lambda d: -d.numel)
    for d in ordered[:SHOWN]:
        table.add_row(
            d.name, f"{d.numel:,}", d.codec or "-", d.strategy, str(d.partitions),
            _ms(d.raw_seconds), _ms(d.seconds), d.why,
        )  # fmt: skip
    if len(ordered) > SHOWN:
        table.add_row(f"... {len(ordered) - SHOWN} more", *[""] * 7)
    return table


def _measured_table(m: Measured) -> Table:
    from rich.table import Table

    table = Table(title=f"A step, mean of {m.steps}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    times = m.fp32_wire_bytes / m.wire_bytes if m.wire_bytes else float("inf")
    table.add_row("sent by this rank", f"{m.wire_bytes / 1e6:.3f} MB")
    table.add_row("left out, as it repeats", f"{m.spared_bytes / 1e6:.3f} MB")
    table.add_row("the same as float32 all-reduce", f"{m.fp32_wire_bytes / 1e6:.3f} MB")
    table.add_row("reduction", f"{times:.1f}x")
    table.add_row("encode", f"{_ms(m.encode_seconds)} ms")
    table.add_row("decode and add", f"{_ms(m.decode_seconds)} ms")
    table.add_row("compute lane waits", f"{_ms(m.wait_seconds)} ms")
    table.add_row("after the backward pass", f"{_ms(m.exposed_seconds)} ms")
    return table


def _probe_table(probe: Probe) -> Table:
    from rich.table import Table

    table = Table(title=f"Probe, {probe.seconds:.2f} s", title_justify="left")
    for name in ("measured", "latency ms", "GB/s"):
        table.add_column(name, justify="left" if name == "measured" else "right")
    lines = {"exchange": probe.costs.exchange}
    lines |= {f"all-reduce {name}": line for name, line in probe.costs.reduce.items()}
    for name, cost in probe.costs.codecs.items():
        lines |= {f"{name} encode": cost.encode, f"{name} decode": cost.decode}
    for name, line in lines.items():
        speed = 1e-9 / line.per_byte if line.per_byte > 0 else float("inf")
        table.add_row(name, _ms(line.latency), f"{speed:.3f}")
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
