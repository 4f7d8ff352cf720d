"""Values of a spec's parameters: given ones, and defaults for the others."""

from __future__ import annotations

from collections.abc import Mapping

from compll.errors import Diagnostic, Problems, Span, nearest
from compll.frontend import derived
from compll.frontend.spec import ANY, ParamValue, Spec, as_float


def parameters(
    spec: Spec, given: Mapping[str, object], problems: Problems
) -> dict[str, ParamValue]:
    """Values of all parameters of the spec: `given` ones, checked, and defaults for the others."""
    known = {p.name: p for p in derived.accepted(spec)}
    for name, value in given.items():
        if name in known and (wrong := known[name].check(value)):
            problems.found.append(Diagnostic("", Span(), wrong))  # of the call, not of the file
        elif name not in known and not spec.broken & {name, ANY}:
            hint = nearest(name, known) or "it has no parameters"
            unknown = f"{spec.name} has no parameter {name!r}"
            problems.found.append(Diagnostic("", Span(), unknown, hint))
    chosen = {p.name: given.get(p.name, p.default) for p in spec.params}
    legal = {n: known[n].default if known[n].check(v) else v for n, v in chosen.items()}
    return {name: _exact(known[name].type, value) for name, value in legal.items()}


def _exact(kind: str, value: object) -> ParamValue:
    return as_float(value) if kind == "float" else value  # type: ignore[return-value]
