"""Errors for specs that a backend refuses, at the binding of the spec that is to blame."""

from __future__ import annotations

from compll.errors import Diagnostic, Span, SpecError
from compll.ir.expr import Expr, walk
from compll.ir.module import Module


class Unsupported(Exception):
    """A shape of program that a backend does not compile; the message says which.

    name: the field or state in which it occurs. expr: the expression to blame.
    """

    def __init__(
        self, message: str, name: str = "", expr: Expr | None = None, hint: str = ""
    ) -> None:
        super().__init__(message)
        self.name, self.expr, self.hint = name, expr, hint


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
            if id(value) in inside and any(e is why.expr for e in walk(value)):
                return module.spans[f"encode.{name}"]
    for place in (*(f"{s}.{why.name}" for s in ("update", "encode", "payload")), why.name):
        if place in module.spans:
            return module.spans[place]
    return module.spans.get("feedback", Span())
