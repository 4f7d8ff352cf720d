"""Errors for specs that a backend refuses, at the binding of the spec that is to blame."""

from __future__ import annotations

from compll.errors import Diagnostic, Span, SpecError
from compll.ir.expr import Expr, walk
from compll.ir.matrices import mixes
from compll.ir.module import Module
from compll.ir.program import Unsupported
from compll.passes.schedule import schedule


def compilable(module: Module) -> None:
    """Raise SpecError for a spec that only the reference computes."""
    try:
        if not mixes(module):
            schedule(module, feed=bool(module.states))
    except Unsupported as why:
        raise refused(module, "cpu", why) from why


def refused(module: Module, target: str, why: Unsupported) -> SpecError:
    """The error for a program that the backend `target` does not compile."""
    message = f"the {target} backend does not compile {why}"
    return SpecError([Diagnostic(module.path or module.name, span(module, why), message, why.hint)])


def span(module: Module, why: Unsupported) -> Span:
    """The innermost binding that holds the refused expression; else the place of the field or
    section that needs it."""
    root = module.bindings.get(why.name)
    if why.expr is not None and root is not None:
        inside = {id(e) for e in walk(root)}
        for name, value in module.bindings.items():
            if id(value) in inside and _holds(value, why.expr):
                return module.spans[f"encode.{name}"]
    for place in (*(f"{s}.{why.name}" for s in ("update", "encode", "payload")), why.name):
        if place in module.spans:
            return module.spans[place]
    return module.spans.get("feedback", Span())


def _holds(value: Expr, part: Expr) -> bool:
    """True if `value` contains `part` (selections by name: feedback rebuilds expressions with
    them)."""
    return any(
        e is part or (e.op == part.op == "in" and e.value == part.value) for e in walk(value)
    )
