"""Parameters that a spec has without declaring them."""

from __future__ import annotations

from collections.abc import Mapping

from compll.errors import Problems, Span
from compll.frontend.spec import Param, Spec
from compll.ir.module import MEAN, REFERENCE, Field

#: for specs with derived error feedback
RESIDUAL = Param(
    "residual", "str", "float32", Span(), choices=("float32", "bfloat16"),
    about="the type of what error feedback keeps: bfloat16 halves its memory",
)  # fmt: skip


def accepted(spec: Spec) -> tuple[Param, ...]:
    """All parameters of a spec: its own, and the derived ones.

    A parameter of the spec's own hides the derived one of the same name.
    """
    own = {p.name for p in spec.params}
    feeds = bool({spec.feedback.value, spec.feedback.other} & {"error", "own"})
    return (*spec.params, *((RESIDUAL,) if feeds and RESIDUAL.name not in own else ()))


def kept_as(
    spec: Spec, arguments: Mapping[str, object], *, feeds: bool, problems: Problems
) -> dict[str, str]:
    """Derived parameters with other values than their defaults; `feeds`: the spec has feedback.

    They choose the type of states, not the meaning of payloads.
    """
    value = arguments.get(RESIDUAL.name, RESIDUAL.default)
    if RESIDUAL not in accepted(spec) or RESIDUAL.check(value) or value == RESIDUAL.default:
        return {}
    if not feeds:
        message = f"residual={value}: with these parameters {spec.name} has no error feedback"
        problems.add(spec.feedback.span, message, "leave it out")
    return {RESIDUAL.name: str(value)}


def states(kept: Mapping[str, str], *, differences: bool) -> tuple[Field, ...]:
    """The states of feedback."""
    if differences:
        return tuple(Field(name, "float32", 32, "n") for name in (REFERENCE, MEAN))
    return (Field(RESIDUAL.name, kept.get(RESIDUAL.name, str(RESIDUAL.default)), 32, "n"),)
