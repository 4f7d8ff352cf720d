"""A warning for a spec that works on whole arrays and moves far more memory than it must."""

from __future__ import annotations

from compll.errors import Diagnostic, Span
from compll.frontend.operators import MIXING
from compll.ir.expr import walk
from compll.ir.module import Module
from compll.passes.traffic import traffic_of

FACTOR = 3.0  # times the least possible bytes; specs with products of matrices alone stay below


def warnings(module: Module) -> list[Diagnostic]:
    """A warning at the first part that prevents fused passes, or none."""
    blamed = _cause(module)
    if blamed is None:
        return []
    found = traffic_of(module, feed=bool(module.states))
    if found.moved <= FACTOR * found.least:
        return []
    span, cause, hint = blamed
    message = (
        f"warning: with {cause} this is computed an array at a time: {len(found.walks)} walks over "
        f"memory move {found.moved:.3g} bytes per element, where {found.least:.3g} would do"
    )
    hint = f"{hint}; `compll explain --traffic` shows the walks, `compll bench` the speed"
    return [Diagnostic(module.path, span, message, hint)]


def _cause(module: Module) -> tuple[Span, str, str] | None:
    """The place and name of the first part that prevents fused passes, and a hint; None if there is
    none."""
    for name, value in module.bindings.items():
        for e in walk(value):
            span = module.spans.get(f"encode.{name}", Span())
            if e.type.shape == "matrix":
                return span, "a matrix", "without matrices the passes are fused"
            if e.op in MIXING:
                return span, e.op, f"without {', '.join(MIXING)} the passes are fused"
    if module.rounds:
        return module.spans["rounds"], "`rounds:`", "without it the passes are fused"
    drawn = next((s.name for s in module.selections if s.kind == "drawn"), "")
    if not drawn:
        return None
    hint = "filter(random(0, 1) < ratio, limit) is fused, but sends positions"
    return module.spans.get(f"encode.{drawn}", Span()), "drawn", hint
