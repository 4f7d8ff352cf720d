"""Dependence of host-computed numbers on the step, such as the ratio of a warm-up."""

from __future__ import annotations

from compll.ir.expr import walk
from compll.ir.module import Module

__all__ = ["follows_step"]


def follows_step(module: Module) -> bool:
    """True if an expression of the spec contains `step`. Random draws depend on the step anyway."""
    selections = [e for s in module.selections for e in (s.key, s.limit, s.threshold)]
    roots = [module.decode, *module.updates.values(), *(f.expr for f in module.fields), *selections]
    found = walk(*(e for e in roots if e is not None))
    return any(e.op == "param" and e.value == "step" for e in found)
