"""Extremes and the status of a full tile in one loop: what they share is read and computed once.

Each takes one step a turn, which LLVM vectorizes; sums in lanes (numbers.py) are loops of their
own, because further results in the same loop gain nothing there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compll.ir.expr import Expr

if TYPE_CHECKING:
    from compll.backends.cpu.reduce import Reducing


def fused(reductions: list[Expr], status: bool) -> list[Expr]:
    """The reductions that share a loop; none where it would have nothing to share."""
    chosen = [e for e in reductions if e.op != "reduce_sum" and e.args[0].type.dtype == "float"]
    return chosen if len(chosen) + status > 1 else []


def telling(reductions: list[Expr], gradient: Expr) -> list[Expr]:
    """Extremes that tell whether the gradient is finite, so that the status needs no look at it.

    Those are the largest magnitude, or the smallest and the largest element: in the order of keys
    infinities and NaNs stand at the ends.
    """
    extremes = [e for e in reductions if e.op != "reduce_sum"]
    for e in extremes:
        (arg,) = e.args
        if e.op == "reduce_max" and arg.op == "abs" and arg.args[0] is gradient:
            return [e]
    ends = {e.op: e for e in extremes if e.args[0] is gradient}
    return list(ends.values()) if len(ends) == 2 else []


def emit(encoder: Reducing, reductions: list[Expr], status: bool) -> None:
    """The loop over a full tile, into `best_NAME` and `bad`."""
    names = [encoder.names[id(e)] for e in reductions]
    encoder.ahead()
    for name in names:
        encoder.add(f"x_{name} = best_{name}")
    with encoder.block(f"for i in range({encoder.tile}):"):
        if status:
            encoder.add(f"bad = i_max(bad, abs_bits({encoder.text(encoder.prog.gradient, 'i')}))")
        for e, name in zip(reductions, names, strict=True):
            choose = "i_max" if e.op == "reduce_max" else "i_min"
            encoder.add(f"x_{name} = {choose}(x_{name}, {_key(encoder, e)})")
    for name in names:
        encoder.add(f"best_{name} = x_{name}")


def _key(encoder: Reducing, e: Expr) -> str:
    """The order key of a term; the bits of a magnitude are one."""
    (arg,) = e.args
    if e.op == "reduce_max" and arg.op == "abs":
        return f"abs_bits({encoder.text(arg.args[0], 'i')})"
    return f"key({encoder.text(arg, 'i')})"
