"""Warnings for specs that compile, but are probably mistakes.

Names count as used wherever the spec has them, also in a branch that these parameters do not take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from compll.errors import Diagnostic, Problems
from compll.frontend.operators import OPERATORS
from compll.frontend.spec import Binding, Declared, Spec
from compll.frontend.syntax import Call, Name, Syntax, names, parts
from compll.ir.expr import Expr, Type, walk
from compll.ir.module import Module
from compll.ir.static import depends, evaluate

#: operators whose values differ from step to step
DRAWS = ("uniform", "shared", "random_matrix", "chosen")


def warnings(spec: Spec, module: Module) -> list[Diagnostic]:
    """Warnings for a spec without errors; `module` is the same spec, typed."""
    problems = Problems(spec.path, most=math.inf)
    needed = _decode(spec, problems)
    _bindings(spec, needed, problems)
    _params(spec, needed, problems)
    _fields(spec, needed, problems)
    _negatives(spec, module, problems)
    _unbiased(spec, module, problems)
    return problems.found


def _decode(spec: Spec, problems: Problems) -> set[str]:
    """Names from outside that decode's result depends on. A name of decode's own hides others."""
    needed = names(spec.decode[-1].value)
    for b in reversed(spec.decode[:-1]):
        if b.name in needed:
            needed = needed - {b.name} | names(b.value)
        else:
            hint = "remove it; the last name is the result"
            problems.add(b.span, f"warning: nothing uses {b.name!r}", hint)
    return needed


def _bindings(spec: Spec, needed: set[str], problems: Problems) -> None:
    """Warn of bindings that nothing depends on, and of states that only states depend on."""
    encode = {b.name: names(b.value) for b in spec.encode}
    update = {b.name: names(b.value) for b in spec.update}
    ends = needed.union({d.name for d in spec.payload}, *map(names, _conditions(spec)))
    used = _reached(encode, ends.union(*update.values()))
    for b in spec.encode:
        if b.name not in used:
            hint = "remove it, or put it into the payload"
            problems.add(b.span, f"warning: nothing uses {b.name!r}", hint)
    used = _reached(encode | update, ends)
    for s in spec.state:
        if s.name not in used:
            message = f"warning: state {s.name!r} changes nothing that is sent"
            problems.add(s.span, message, "use it in encode, or remove it")


def _reached(graph: Mapping[str, set[str]], ends: set[str]) -> set[str]:
    """Names that `ends` depend on."""
    reached, todo = set[str](), set(ends)
    while todo:
        reached |= todo
        todo = set[str]().union(*(graph.get(name, ()) for name in todo)) - reached
    return reached


def _conditions(spec: Spec) -> Iterable[Syntax]:
    """Expressions outside of encode, decode and update: lengths, and conditions of parameters."""
    declared = (
        tree
        for d in _alternatives((*spec.payload, *spec.state))
        for tree in (d.bits, d.dim, d.second, d.condition)
    )
    chosen = (
        spec.group,
        spec.when,
        spec.feedback.condition,
        spec.feedback.factor,
        spec.unbiased.condition,
    )
    return (tree for tree in (*declared, *chosen) if tree is not None)


def _alternatives(declared: Iterable[Declared]) -> Iterable[Declared]:
    """Declarations, and those that parameters may choose in place of them."""
    for one in declared:
        yield one
        yield from _alternatives(() if one.other is None else (one.other,))


def _values(bindings: Iterable[Binding]) -> Iterable[Syntax]:
    return (b.value for b in bindings)


def _params(spec: Spec, needed: set[str], problems: Problems) -> None:
    computed = _values((*spec.encode, *spec.update))
    used = needed.union(*map(names, (*computed, *_conditions(spec))))
    for p in spec.params:
        if p.name not in used:
            problems.add(p.span, f"warning: nothing uses parameter {p.name!r}", "remove it")


def _fields(spec: Spec, needed: set[str], problems: Problems) -> None:
    """Warn of payload fields that nothing uses. In `rounds:` ranks may need a field to go on."""
    used = needed.union(*map(_combined, _values((*spec.encode, *spec.update))))
    for d in spec.payload:
        if d.name not in used:
            message = f"warning: decode does not use payload field {d.name!r}"
            problems.add(d.span, message, "remove it: it travels for nothing")


def _combined(tree: Syntax) -> set[str]:
    """Payload fields whose combined value the tree uses."""
    calls = (part for part in parts(tree) if isinstance(part, Call) and part.op == "combined")
    return {a.name for call in calls for a in call.args if isinstance(a, Name)}


def _negatives(spec: Spec, module: Module, problems: Problems) -> None:
    """Warn of fields of unsigned type that lose negative values."""
    g = module.pool.make("input", (), Type("float", "n"), "g")
    for d in _alternatives(spec.payload):
        value = module.bindings.get(d.name, g if d.name == "g" else None)
        unsigned = d.base.startswith("uint") or d.base in ("bool", "trit", "runs", "huffman")
        if unsigned and value is not None and _negative(value):
            message = f"warning: {d.name!r} can be negative, which {d.base} holds as 0"
            problems.add(d.span, message, "add an offset in encode, and take it away in decode")


def _unbiased(spec: Spec, module: Module, problems: Problems) -> None:
    """Warn of an `unbiased` that cannot hold: without draws each step loses the same."""
    roots = [f.expr for f in module.fields if f.expr is not None] + [module.decode]
    keys = [s.key for s in module.selections]
    drawn = any(s.kind == "drawn" for s in module.selections)
    drawn = drawn or any(e.op in DRAWS for e in walk(*roots, *keys))
    lossless = module.decoded is not None and module.decoded.op == "input"
    if module.unbiased and not drawn and not lossless:
        message = "warning: `unbiased: true` cannot hold: nothing is drawn at random"
        hint = "round by floor(x + random(0, 1)), or remove it"
        problems.add(spec.unbiased.span, message, hint)


def _negative(x: Expr) -> bool:
    """True if x is certainly negative for some gradients."""
    values = x.args[1:] if x.op in ("where", "choose") else (x,)
    return any(map(_below_zero, values)) or _either(x)


def _below_zero(x: Expr) -> bool:
    """True if x is a negative literal."""
    number = x.args[0] if x.op == "lift" else x
    if number.type.shape != "static" or depends(number):
        return False
    value = evaluate(number, {})
    return not isinstance(value, str) and value < 0


def _either(x: Expr) -> bool:
    """True if x has both signs: an element of the gradient, or a multiple by a shared number."""
    if x.op == "input":
        return True
    if x.op in OPERATORS and OPERATORS[x.op].signed:
        return _either(x.args[0])
    if x.op in ("mul", "div"):
        a, b = x.args
        return (_either(a) and b.op == "lift") or (_either(b) and a.op == "lift" and x.op == "mul")
    return False
