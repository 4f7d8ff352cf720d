"""The tables of a printed report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hipress.choose.plan import UNCOMPRESSED, Decision, Plan
from hipress.model.params import Param

if TYPE_CHECKING:
    from hipress.optim.adam import Freezing
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from casync.cost import Line
from hipress.choose.trial import Tried
from hipress.reporting.measured import Measured, total_of
from hipress.reporting.text_table import Table

if TYPE_CHECKING:
    from hipress.choose.probe import Probe


def describe_plan(plan: Plan, params: Sequence[Param]) -> str:
    """A line on the compressed share of the model, the codecs, their gain, and the reason.

    Sparse gradients are left out of all sums: their bytes depend on the step.
    """
    if not plan.compresses:
        return f"nothing is compressed, the native all-reduce remains: {plan.why}"
    done = [(p, d) for p, d in zip(params, plan.decisions, strict=True) if _compressed(d)]
    codecs = sorted({f"{codec_name(d)} ({d.strategy})" for _, d in done})
    dense = [p for p in params if not p.sparse]
    before = sum(p.nbytes for p in dense)
    after = before + sum(_payload_bytes(plan, d) - p.nbytes for p, d in done)
    sparse = f" ({len(params) - len(dense)} sparse ones aside)" * (len(dense) < len(params))
    return (
        f"{' and '.join(codecs)} for {len(done)} of {len(params)} parameters, "
        f"{compressed_share(plan, params):.1%} of {sum(p.numel for p in dense):,} elements: "
        f"{before / 1e6:.4g} MB a step{sparse} become at most {after / 1e6:.4g} MB; "
        f"{plan.why}"
    )


def describe_phases(optimizer: Freezing, before: Plan, after: Plan, params: Sequence[Param]) -> str:
    """Text on the plans of gradients, until `optimizer` freezes, and of its momentum from then
    on."""
    name = f"hipress.optim.{type(optimizer).__name__}"
    now = "after" if optimizer.averaging else "before"
    return (
        f"until {name} freezes (freeze={optimizer.freeze!r}), gradients: "
        f"{describe_plan(before, params)}; from then on its momentum: "
        f"{describe_plan(after, params)}; now {now} the freeze"
    )


def compressed_share(plan: Plan, params: Sequence[Param]) -> float:
    """The compressed share of the elements of all dense gradients (0 to 1)."""
    total = sum(p.numel for p in params if not p.sparse)
    done = sum(d.numel for d in plan.decisions if _compressed(d))
    return done / total if total else 0.0


def _compressed(decision: Decision) -> bool:
    return decision.codec not in (None, UNCOMPRESSED)


def _payload_bytes(plan: Plan, decision: Decision) -> int:
    return plan.codecs[str(decision.codec)].payload_bytes(decision.numel)


def codec_name(decision: Decision) -> str:
    """The codec's key without settings by shape: `powersgd` of `powersgd(columns=650)`."""
    return (decision.codec or "-").partition("(")[0]


def sent_table(m: Measured, when: str = "") -> Table:
    """Bytes that this rank sends in a step, a row for each kind of gradients. when: the phase that
    these steps belong to."""
    table = Table(
        f"Sent by this rank in a step, mean of {m.steps} {when}".rstrip(),
        "DDP: sent by DDP alone for the same gradients. reduction: DDP / sent.",
    )
    table.add_columns(["gradients"], ["MB", "share", "DDP MB", "sent MB", "reduction"])
    whole = total_of(m.kinds.values())
    for name, kind in (*m.kinds.items(), ("all", whole)):
        if kind.gradient_bytes:
            table.add_row(
                name, _mb(kind.gradient_bytes),
                f"{kind.gradient_bytes / whole.gradient_bytes:.1%}",
                _mb(kind.ddp_bytes), _mb(kind.wire_bytes), f"{kind.reduction:.1f}x",
            )  # fmt: skip
    return table


def room_table(measured: Measured, cuts: Mapping[str, bool]) -> Table:
    """Bytes a step sent because both sides of a message must know its length beforehand."""
    table = Table("Lengths that vary, known beforehand")
    table.add_columns(["codec", "room"], ["unused MB"])
    if measured.exact_bytes:
        exact = _mb(measured.exact_bytes)
        table.caption = f"{exact} MB were sent exactly: the host waited for their lengths."
    for name, size in measured.unused_bytes.items():
        room = "by the last step; the rest waits" if cuts.get(name) else "for the largest payload"
        table.add_row(name, room, _mb(size))
    return table


def decision_table(decisions: Sequence[Decision]) -> Table:
    """A row for the parameters of each codec, strategy and reason; most elements first."""
    table = Table("Plan")
    table.add_columns(["codec", "strategy", "why", "largest"], ["parameters", "elements"])
    for group, members in _group(decisions):
        first = members[0]
        row = [*group, first.name, f"{len(members):,}"]
        table.add_row(*row, f"{_elements(members):,}")
    return table


def _group(decisions: Sequence[Decision]) -> list[tuple[tuple[str, str, str], list[Decision]]]:
    """Decisions grouped by codec, strategy and reason. Groups with the most elements come first,
    and so do parameters within each."""
    groups: dict[tuple[str, str, str], list[Decision]] = {}
    for d in sorted(decisions, key=lambda d: -d.numel):
        groups.setdefault((codec_name(d), d.strategy, d.why), []).append(d)
    return sorted(groups.items(), key=lambda each: -_elements(each[1]))


def _elements(decisions: Sequence[Decision]) -> int:
    return sum(d.numel for d in decisions)


def time_table(m: Measured) -> Table:
    """Times of a step, on this rank."""
    table = Table("Time in a step")
    table.add_columns(["what"], ["ms"])
    table.add_row("encode", _ms(m.encode_seconds))
    table.add_row("decode, and add up", _ms(m.decode_seconds))
    table.add_row("waiting for messages, with nothing to encode or decode", _ms(m.wait_seconds))
    table.add_row("backward pass is over, waiting for the last buckets", _ms(m.exposed_seconds))
    return table


def tried_table(tried: Sequence[Tried], cost: float | None) -> Table:
    """Plans of the trial. cost: seconds of the trial, if it is over."""
    table = Table("Plans tried")
    table.caption = "predicted: a step. step: median on the slowest rank; " + (
        "being tried." if cost is None else f"the trial cost {cost:.2f} s."
    )
    table.add_columns(["plan"], ["predicted ms", "steps", "step ms", "spread ms"])
    table.add_columns(["verdict"], [])
    for each in tried:
        times = map(_ms, (each.step_seconds, each.spread_seconds))
        table.add_row(each.plan, _ms(each.predicted_seconds), str(each.steps), *times, each.verdict)
    return table


def probe_table(probe: Probe) -> Table:
    """Measured costs of links and codecs."""
    costs = probe.costs
    table = Table(f"Probe, {probe.seconds:.2f} s")
    table.add_columns(["measured"], ["latency ms", "GB/s", "cores"])
    transfers = {f"to {peers} at once": each for peers, each in costs.exchange.items()}
    transfers |= {f"all-reduce {name}": each for name, each in costs.reduce.items()}
    for name, each in transfers.items():
        table.add_row(name, _ms(each.line.latency), _speed(each.line), f"{each.cores:.2f}")
    copies = costs.copies
    ways = () if copies is None else (("to the host", copies.leave), ("to the GPU", copies.enter))
    for what, line in ways:
        table.add_row(f"copies {what}", _ms(line.latency), _speed(line), "-")
    for name, cost in costs.codecs.items():
        for what, line in (("encode", cost.encode), ("decode", cost.decode), ("hop", cost.hop)):
            table.add_row(f"{name} {what}", _ms(line.latency), _speed(line), "1")
    table.caption = f"A backward pass hides {costs.overlap:.0%} of the work beside it."
    return table


def _speed(line: Line) -> str:
    return f"{1e-9 / line.per_byte if line.per_byte > 0 else math.inf:.3f}"


def _mb(count: float) -> str:
    return f"{count / 1e6:.3f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
