"""What hipress does to a model, and what it cost so far: `hipress.report(ddp)`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hipress.model import Param
from hipress.plan.rules import UNCOMPRESSED, Decision, Plan
from hipress.plan.trial import Tried

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from casync.predict.cost import Line
    from casync.runtime.counters import Counters
    from hipress.plan.probe import Probe
    from hipress.sync.traffic import Traffic


@dataclass(frozen=True)
class Sent:
    """Bytes a step of one kind of gradients, on one rank."""

    gradient_bytes: float  # the gradients themselves
    ddp_bytes: float  # what this rank would send of them with DDP alone
    wire_bytes: float  # what this rank sends of them

    @property
    def reduction(self) -> float:
        """How many times less that is than with DDP alone; 1 where nothing would be sent."""
        if self.wire_bytes:
            return self.ddp_bytes / self.wire_bytes
        return math.inf if self.ddp_bytes else 1.0


@dataclass(frozen=True)
class Measured:
    """Per step, on this rank, averaged over the steps of this process."""

    steps: int
    kinds: Mapping[str, Sent]  # "compressed", "uncompressed" and "sparse" gradients
    gradient_bytes: float  # of all kinds, as are the next two
    ddp_wire_bytes: float
    wire_bytes: float
    payload_bytes: float  # of the messages that we send to peers
    spared_bytes: float  # of these, blocks that repeat and so do not travel
    unused_bytes: Mapping[str, float]  # of these, by codec: room that payloads left
    exact_bytes: float  # of these, in messages for whose lengths the host waited
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
    cuts: Mapping[str, bool] = field(default_factory=dict)  # by codec: whether it takes a capacity
    tried: tuple[Tried, ...] = ()  # by "auto", in the last trial
    trial_seconds: float | None = None  # what that cost; None before its end

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
            "cuts": dict(self.cuts),
            "tried": [asdict(each) for each in self.tried],
            "trial_seconds": self.trial_seconds,
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
        from rich.markup import escape

        yield f"[bold]hipress[/bold], rank {self.rank} of {self.world_size}: {escape(self.why)}"
        if self.measured is not None:
            yield _sent_table(self.measured)
        if self.measured is not None and self.measured.unused_bytes:
            yield _room_table(self.measured, self.cuts)
        yield _decision_table(self.decisions)
        if self.measured is not None:
            yield _time_table(self.measured)
        if self.tried:
            yield _tried_table(self.tried, self.trial_seconds)
        if self.probe is not None:
            yield _probe_table(self.probe)


def measure_of(traffic: Traffic, counters: Counters, world_size: int) -> Measured | None:
    """Averages per step from an engine's counts; None before the first step."""
    steps = traffic.steps
    if steps == 0:
        return None
    kinds = _kinds(traffic, counters, world_size)
    total = _total(kinds)
    return Measured(
        steps=steps,
        kinds=kinds,
        gradient_bytes=total.gradient_bytes,
        ddp_wire_bytes=total.ddp_bytes,
        wire_bytes=total.wire_bytes,
        payload_bytes=counters.bytes_sent / steps,
        spared_bytes=counters.bytes_spared / steps,
        exact_bytes=counters.bytes_exact / steps,
        unused_bytes={name: n / steps for name, n in sorted(counters.bytes_unused.items())},
        encode_seconds=counters.encode_seconds / steps,
        decode_seconds=counters.decode_seconds / steps,
        wait_seconds=counters.wait_seconds / steps,
        exposed_seconds=traffic.exposed_seconds / steps,
    )


def _kinds(traffic: Traffic, counters: Counters, world_size: int) -> dict[str, Sent]:
    """What was sent of each kind of gradients. gloo gathers sparse ones: each rank sends its own,
    or passes on another's, to every other rank."""
    steps, ring = traffic.steps, share(world_size)
    plain = traffic.gradient_bytes - traffic.compressed_bytes
    sparse = (world_size - 1) * traffic.sparse_bytes
    kinds = {
        "compressed": (
            traffic.compressed_bytes,
            ring * traffic.compressed_bytes,
            counters.wire_bytes - ring * traffic.mixed_bytes,
        ),
        "uncompressed": (plain, ring * plain, ring * (traffic.raw_bytes + traffic.mixed_bytes)),
        "sparse": (traffic.sparse_bytes, sparse, sparse),
    }
    return {name: Sent(*(count / steps for count in counts)) for name, counts in kinds.items()}


def _total(kinds: Mapping[str, Sent]) -> Sent:
    return Sent(
        sum(kind.gradient_bytes for kind in kinds.values()),
        sum(kind.ddp_bytes for kind in kinds.values()),
        sum(kind.wire_bytes for kind in kinds.values()),
    )


def share(world_size: int) -> float:
    """Bytes that a rank sends in an all-reduce, per byte of data."""
    return 2 * (world_size - 1) / world_size


def all_reduce_bytes(numel: int, world_size: int) -> float:
    """What a rank sends to average `numel` float32 numbers natively."""
    return share(world_size) * 4 * numel


def describe_plan(plan: Plan, params: Sequence[Param]) -> str:
    """One line: how much of the model is compressed, by what, what is expected of it, and why.

    Sparse gradients are left out of all sums: what they take depends on the step.
    """
    if not plan.compresses:
        return f"nothing is compressed, the native all-reduce remains: {plan.why}"
    done = [(p, d) for p, d in zip(params, plan.decisions, strict=True) if _compressed(d)]
    codecs = sorted({f"{_codec_name(d)} ({d.strategy})" for _, d in done})
    dense = [p for p in params if not p.sparse]
    before = sum(_nbytes(p) for p in dense)
    after = before + sum(_payload_bytes(plan, d) - _nbytes(p) for p, d in done)
    sparse = f" ({len(params) - len(dense)} sparse ones aside)" * (len(dense) < len(params))
    return (
        f"{' and '.join(codecs)} for {len(done)} of {len(params)} parameters, "
        f"{compressed_share(plan, params):.1%} of {sum(p.numel for p in dense):,} elements: "
        f"{before / 1e6:.4g} MB a step{sparse} become at most {after / 1e6:.4g} MB; "
        f"{plan.why}"
    )


def compressed_share(plan: Plan, params: Sequence[Param]) -> float:
    """Of the elements of all dense gradients, those that are compressed (0 to 1)."""
    total = sum(p.numel for p in params if not p.sparse)
    done = sum(d.numel for d in plan.decisions if _compressed(d))
    return done / total if total else 0.0


def _compressed(decision: Decision) -> bool:
    return decision.codec not in (None, UNCOMPRESSED)


def _nbytes(param: Param) -> int:
    return param.numel * param.dtype.itemsize


def _payload_bytes(plan: Plan, decision: Decision) -> int:
    codec = plan.codecs[str(decision.codec)]
    if codec.rounds:
        return sum(each.payload_bytes(decision.numel) for each in codec.rounds)
    return codec.payload_bytes(decision.numel)


def _codec_name(decision: Decision) -> str:
    """Without what a parameter's shape settles: `powersgd` of `powersgd(columns=650)`."""
    return (decision.codec or "-").partition("(")[0]


def _sent_table(m: Measured) -> Table:
    from rich.table import Table

    table = Table(
        title=f"Sent by this rank in a step, mean of {m.steps}", title_justify="left",
        caption="DDP: what DDP alone would send of the same gradients. reduction: DDP / sent.",
        caption_justify="left",
    )  # fmt: skip
    for name in ("gradients", "MB", "share", "DDP MB", "sent MB", "reduction"):
        table.add_column(name, justify="left" if name == "gradients" else "right")
    whole = _total(m.kinds)
    for name, kind in (*m.kinds.items(), ("all", whole)):
        if kind.gradient_bytes:
            table.add_row(
                name, _mb(kind.gradient_bytes),
                f"{kind.gradient_bytes / whole.gradient_bytes:.1%}",
                _mb(kind.ddp_bytes), _mb(kind.wire_bytes), f"{kind.reduction:.1f}x",
            )  # fmt: skip
    return table


def _room_table(measured: Measured, cuts: Mapping[str, bool]) -> Table:
    """What it cost in a step that both sides of a message must know its length beforehand."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Lengths that vary, known beforehand", title_justify="left")
    for name in ("codec", "room", "unused MB"):
        table.add_column(name, justify="right" if name == "unused MB" else "left")
    if measured.exact_bytes:
        table.caption = f"{_mb(measured.exact_bytes)} MB went as they were: the host waited for it."
    for name, size in measured.unused_bytes.items():
        room = "by the last step; the rest waits" if cuts.get(name) else "for the most there may be"
        table.add_row(escape(name), room, _mb(size))
    return table


def _decision_table(decisions: Sequence[Decision]) -> Table:
    """A row for the parameters of each codec, strategy and reason; most elements first."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Plan", title_justify="left", caption_justify="left")
    for name in ("codec", "strategy", "why", "largest", "parameters", "elements"):
        table.add_column(name, justify="right" if name in ("parameters", "elements") else "left")
    predicted = any(d.gain is not None for d in decisions)
    if predicted:
        table.caption = (
            "gain: how much longer a step would take if the largest were uncompressed; "
            "otherwise: the next best for it, and how much longer with that. Predicted, in ms."
        )
        for name in ("gain", "otherwise", "ms"):
            table.add_column(name, justify="left" if name == "otherwise" else "right")
    for group, members in _grouped(decisions):
        first = members[0]
        row = [*map(escape, (*group, first.name)), f"{len(members):,}"]
        more = (_ms(first.gain), escape(first.runner_up or "-"), _ms(first.margin))
        table.add_row(*row, f"{_elements(members):,}", *(more if predicted else ()))
    return table


def _grouped(decisions: Sequence[Decision]) -> list[tuple[tuple[str, str, str], list[Decision]]]:
    """By codec, strategy and reason; groups, and parameters of each, with most elements first."""
    groups: dict[tuple[str, str, str], list[Decision]] = {}
    for d in sorted(decisions, key=lambda d: -d.numel):
        groups.setdefault((_codec_name(d), d.strategy, d.why), []).append(d)
    return sorted(groups.items(), key=lambda each: -_elements(each[1]))


def _elements(decisions: Sequence[Decision]) -> int:
    return sum(d.numel for d in decisions)


def _time_table(m: Measured) -> Table:
    from rich.table import Table

    table = Table(title="Time in a step", title_justify="left")
    table.add_column("what")
    table.add_column("ms", justify="right")
    table.add_row("encode", _ms(m.encode_seconds))
    table.add_row("decode, and add up", _ms(m.decode_seconds))
    table.add_row("waiting for messages, with nothing to encode or decode", _ms(m.wait_seconds))
    table.add_row("backward pass is over, waiting for the last buckets", _ms(m.exposed_seconds))
    return table


def _tried_table(tried: Sequence[Tried], cost: float | None) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Plans tried", title_justify="left", caption_justify="left")
    table.caption = "predicted: a step. step: median on the slowest rank; " + (
        "being tried." if cost is None else f"the trial cost {cost:.2f} s."
    )
    for name in ("plan", "predicted ms", "steps", "step ms", "spread ms", "verdict"):
        table.add_column(name, justify="left" if name in ("plan", "verdict") else "right")
    for each in tried:
        times = map(_ms, (each.step_seconds, each.spread_seconds))
        table.add_row(
            escape(each.plan), _ms(each.predicted_seconds), str(each.steps), *times, each.verdict
        )
    return table


def _probe_table(probe: Probe) -> Table:
    from rich.table import Table

    costs = probe.costs
    table = Table(title=f"Probe, {probe.seconds:.2f} s", title_justify="left")
    for name in ("measured", "latency ms", "GB/s", "cores"):
        table.add_column(name, justify="left" if name == "measured" else "right")
    transfers = {f"to {peers} at once": each for peers, each in costs.exchange.items()}
    transfers |= {f"all-reduce {name}": each for name, each in costs.reduce.items()}
    for name, each in transfers.items():
        table.add_row(name, _ms(each.line.latency), _speed(each.line), f"{each.cores:.2f}")
    for name, cost in costs.codecs.items():
        for what, line in (("encode", cost.encode), ("decode", cost.decode), ("hop", cost.hop)):
            table.add_row(f"{name} {what}", _ms(line.latency), _speed(line), "1")
    table.caption = f"Of work beside a backward pass, {costs.overlap:.0%} hides behind it."
    return table


def _speed(line: Line) -> str:
    return f"{1e-9 / line.per_byte if line.per_byte > 0 else math.inf:.3f}"


def _mb(count: float) -> str:
    return f"{count / 1e6:.3f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
