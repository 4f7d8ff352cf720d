"""Stage 3, `update`: every state's new value, checked to fit the state."""

from __future__ import annotations

from compll.errors import Span, closest, nearest
from compll.frontend import recovery
from compll.frontend.check_exprs import Expressions
from compll.frontend.syntax import Syntax
from compll.ir.expr import Expr
from compll.ir.module import Field


class Updates:
    """Checks the section `update`."""

    def __init__(self, exprs: Expressions) -> None:
        self.exprs, self.spec = exprs, exprs.spec

    def updates(self, states: tuple[Field, ...], env: dict[str, Expr]) -> dict[str, Expr]:
        known = {s.name: s for s in states}
        self.exprs.rules.encoding = True
        named, meant = {b.name for b in self.spec.update}, set[str]()
        states_ = {s.name for s in self.spec.state} | set(self.spec.broken)
        computed = {b.name for b in self.spec.encode} - states_
        for binding in self.spec.update:
            told = binding.name not in computed and self.exprs.excused(binding.name)
            if binding.name not in known and not told:
                hint = nearest(binding.name, known) or "states are declared in `state:`"
                self.exprs.problems.add(binding.span, f"{binding.name!r} is no state", hint)
                meant.add(closest(binding.name, known) or "")
        for name in known:
            if name not in named | meant and not self.exprs.excused(name):
                self.exprs.problems.add(
                    self.spec.spans.get("update", self.spec.spans.get("state", Span())),
                    f"state {name!r} is never updated",
                    f"add `update: {{{name}: ...}}`",
                )
        pairs = [(b, self.exprs.expr(b.value, env, b.name)) for b in self.spec.update]
        return {
            b.name: fitted
            for b, e in pairs
            if e is not None and b.name in known and (fitted := self.fit(b.value, known[b.name], e))
        }

    def fit(self, syntax: Syntax, state: Field, value: Expr) -> Expr | None:
        if recovery.wrong(value):
            return None
        if state.shape == "matrix" and value.type.dims == state.dims:
            return value
        if value.type.shape == "matrix" or state.shape == "matrix":
            message = f"state {state.name!r} cannot hold {value.type}"
            self.exprs.problems.add(
                syntax.span, message, "rows and columns must be the declared ones"
            )
            return None
        if value.type.dtype in ("selection", "str") or value.type.shape not in (
            "static",
            "scalar",
            state.shape,
        ):
            hint = f"declare it as {state.storage}[n]" if value.type.shape == "n" else ""
            self.exprs.problems.add(
                syntax.span, f"state {state.name!r} cannot hold {value.type}", hint
            )
            return None
        return self.exprs.rules.lift(self.floats(value), state.shape)

    def floats(self, value: Expr) -> Expr:
        """A state's value as floats. A `where` on selected elements stays outermost."""
        if value.op == "where" and value.args[0].op == "in":
            c, *either = value.args
            value = self.exprs.rules.where(
                "where", (c, *(self.exprs.rules.number(a, "float") for a in either))
            )
        return self.exprs.rules.number(value, "float")
