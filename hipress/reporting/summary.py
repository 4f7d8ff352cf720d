"""Summaries of a plan in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hipress.model.params import Param
from hipress.plan.plan import UNCOMPRESSED, Decision, Plan

if TYPE_CHECKING:
    from hipress.optim.adam import Freezing


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
