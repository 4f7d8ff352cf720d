"""Stage 3, names: each has one meaning. Messages for names without a meaning. Texts, with which
names of parameters are compared."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from compll.errors import Problems, Span, nearest
from compll.frontend.operators import CALLABLE, CONSTANTS, MEANT, OPERATORS, RESERVED, SYNONYMS
from compll.frontend.spec import Param, ParamValue, Spec
from compll.frontend.syntax import SYMBOLS, Call, Name, Syntax, Word, called, names
from compll.ir.module import MEAN, REFERENCE, RESIDUAL

Advice = tuple[str, str]
#: arguments of compll.compile besides a spec's parameters
TAKEN = ("name_or_path", "target")


def unknown(
    tree: Name, env: Iterable[str], order: Mapping[str, Span], current: str, spec: Spec
) -> Advice:
    """Message and hint for a name that `env` lacks, in the definition of `current`.

    order: all names of the section being read; those not in `env` are defined later.
    """
    name = tree.name
    if name in order and name == current:
        hint = "a state keeps a value between calls, iterate(...) repeats within one"
        return f"{name!r} is used in its own definition", hint
    if name in order:
        message = f"{name!r} is defined below, in line {order[name].line}"
        return message, "definitions are read in order: put it first"
    if name in {b.name for b in spec.update}:
        return f"{name!r} is no state", "declare it: `state: {" + name + ': "float32[n]"}`'
    if any(name in p.choices for p in spec.params):
        return f"unknown name {name!r}", f"a text is quoted: '{name}'"
    if name in OPERATORS:
        return f"{name!r} is an operator", f"call it with {OPERATORS[name].arity}"
    return f"unknown name {name!r}", nearest(name, env)


#: methods that need states at receivers, and how a spec has them
STATES = "for EF21 and DIANA, see `feedback: difference`"


def beyond_decode(name: str, spec: Spec, selections: Container[str], static: Container[str]) -> str:
    """Hint for a name of encode that decode uses; "" if encode has no such name."""
    if name == "step":
        return "put what depends on the step into the payload"
    if name == "g" or name in {s.name for s in spec.state}:
        hint = "decode sees payload fields and parameters only: receivers keep no states"
        held = name != "g"
        return f"{hint} ({STATES})" if held else hint
    if name in selections:
        return f"store indices({name}) in the payload, and use that field"
    if name not in {b.name for b in spec.encode}:
        return ""
    if name in static:
        return "it depends on the step, which decode does not know"
    if spec.group is None and _drawn_alone(name, spec):
        return "draw it by shared(a, b), which decode knows, too, or add it to `payload:`"
    return "add it to `payload:`"


def _drawn_alone(name: str, spec: Spec) -> bool:
    """True if a binding consists of random draws and parameters only."""
    tree = next(b.value for b in spec.encode if b.name == name)
    known = {"n", *CONSTANTS, *(p.name for p in spec.params)}
    return "random" in called(tree) and names(tree) <= known


def unknown_operator(op: str, env: Container[str]) -> Advice:
    """Message and hint for a call of an unknown operator."""
    symbol = SYMBOLS.get(op, op)
    if op in env:
        return f"{op!r} is a value, and only operators are called", ""
    if op in MEANT:
        return f"unknown operator {symbol!r}", MEANT[op]
    if op in SYNONYMS:
        return f"unknown operator {symbol!r}", f"did you mean {SYNONYMS[op]!r}?"
    return f"unknown operator {symbol!r}", nearest(op, CALLABLE)


def unique(spec: Spec, problems: Problems) -> None:
    """Report names that are defined twice or reserved."""
    seen: dict[str, Span] = {}
    declared = [(p.name, p.span) for p in spec.params] + [(s.name, s.span) for s in spec.state]
    for name, span in declared + [(b.name, b.span) for b in spec.encode]:
        if name in RESERVED:
            problems.add(
                span, f"{name!r} already has a meaning in the language", "choose another name"
            )
        elif name in seen:
            hint = f"first at line {seen[name].line}"
            if name in {s.name for s in spec.state}:
                hint += "; give its new value another name, and that to `update:`"
            problems.add(span, f"{name!r} is defined twice", hint)
        seen.setdefault(name, span)
    for p in spec.params:
        if p.name in TAKEN:
            message = f"{p.name!r} cannot be given: `compll.compile` has an argument of this name"
            problems.add(p.span, message, "choose another name")
    chosen = {spec.feedback.value, spec.feedback.other}
    kinds = {"error": (RESIDUAL,), "own": (RESIDUAL,), "difference": (REFERENCE, MEAN)}
    for kind in sorted(chosen & kinds.keys()):
        for name in {s.name for s in spec.state}.intersection(kinds[kind]):
            problems.add(
                spec.feedback.span,
                f"`feedback: {kind}` makes the state {name!r} itself",
                "remove it from `state:`",
            )


TEXT_HINT = "like `mode == 'nearest'` of `mode: {type: str, default: nearest, choices: [...]}`"


def equal(
    tree: Call, spec: Spec, params: Mapping[str, ParamValue], problems: Problems
) -> bool | None:
    """True if a parameter equals a text; None, with the reason in `problems`, if they do not
    compare."""
    left, right = tree.args
    other, word = (right, left) if isinstance(left, Word) else (left, right)
    param = _param(other, spec)
    if param is None or not isinstance(word, Word):
        problems.add(tree.span, "a text is compared with a parameter of type str", TEXT_HINT)
        return None
    if param.choices and word.value not in param.choices:
        choices = [str(c) for c in param.choices]
        problems.add(
            word.span, f"parameter {param.name!r} is never {word.value!r}",
            nearest(word.value, choices),
        )  # fmt: skip
        return None
    return (params[param.name] == word.value) == (tree.op == "eq")


def _param(tree: Syntax, spec: Spec) -> Param | None:
    named = (p for p in spec.params if isinstance(tree, Name) and p.name == tree.name)
    return next((p for p in named if p.type == "str"), None)
