"""Parameters that a spec has without declaring them."""

from __future__ import annotations

from collections.abc import Mapping

from compll.errors import Problems, Span
from compll.frontend.spec import Param, Spec
from compll.ir.module import Field

#: of specs with derived error feedback
RESIDUAL = Param(
    "residual", "str", "float32", Span(), choices=("float32", "bfloat16"),
    about="the type of what error feedback keeps: bfloat16 halves its memory",
)  # fmt: skip


def accepted(spec: Spec) -> tuple[Param, ...]:
    """The parameters that a spec takes: its own, and those it has without declaring them.

    A parameter of its own with the same name keeps its own meaning.
    """
    own = {p.name for p in spec.params}
    feeds = bool({spec.feedback.value, spec.feedback.other} & {"error", "own"})
    return (*spec.params, *((RESIDUAL,) if feeds and RESIDUAL.name not in own else ()))


def kept_as(
    spec: Spec, given: Mapping[str, object], *, feeds: bool, problems: Problems
) -> dict[str, str]:
    """Derived parameters with other values than the defaults; `feeds`: whether there is feedback.

    They choose how states are kept, not what payloads mean.
    """
    value = given.get(RESIDUAL.name, RESIDUAL.default)
    if RESIDUAL not in accepted(spec) or RESIDUAL.check(value) or value == RESIDUAL.default:
        return {}
    if not feeds:
        message = f"residual={value}: with these parameters {spec.name} has no error feedback"
        problems.add(spec.feedback.span, message, "leave it out")
    return {RESIDUAL.name: str(value)}


def residual(kept: Mapping[str, str]) -> Field:
    """The state of error feedback."""
    return Field("residual", kept.get(RESIDUAL.name, str(RESIDUAL.default)), 32, "n")
