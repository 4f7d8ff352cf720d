"""Warnings: what a spec declares and does not use, what it costs, claims that data refute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np

from compll.errors import CompllError, Diagnostic, Problems, Span
from compll.frontend.operators import MIXING, OPERATORS
from compll.frontend.spec import Binding, Call, Declared, Name, Spec, Syntax, names, parts
from compll.ir.expr import Expr, Type, formula, walk
from compll.ir.layout import limits
from compll.ir.module import PACKED, Module
from compll.ir.static import depends, evaluate
from compll.numerics.numbers import F32, U8
from compll.passes.traffic import traffic_of
from compll.runtime.codec import Codec

# ---- lint ---------------------------------------------------------------------------------------
# Warnings for specs that compile, but are probably mistakes.
# Names count as used wherever the spec has them, also in a branch that these parameters do not
# take.

#: operators whose values differ from step to step
DRAWING = ("uniform", "shared", "random_matrix", "chosen")


def spec_warnings(spec: Spec, module: Module) -> list[Diagnostic]:
    """Warnings for a spec without errors; `module` is the same spec, typed."""
    problems = Problems(spec.path, most=math.inf)
    needed = _decode(spec, problems)
    _bindings(spec, needed, problems)
    _params(spec, needed, problems)
    _fields(spec, needed, problems)
    _negatives(spec, module, problems)
    _unbiased(spec, module, problems)
    return problems.diagnostics


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
    for alternative in declared:
        yield alternative
        yield from _alternatives(() if alternative.other is None else (alternative.other,))


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
        unsigned = d.base.startswith("uint") or d.base in ("bool", *PACKED)
        if unsigned and value is not None and _negative(value):
            message = f"warning: {d.name!r} can be negative, which {d.base} holds as 0"
            problems.add(d.span, message, "add an offset in encode, and take it away in decode")


def _unbiased(spec: Spec, module: Module, problems: Problems) -> None:
    """Warn of an `unbiased` that cannot hold: without draws each step loses the same."""
    roots = [f.expr for f in module.fields if f.expr is not None] + [module.decode]
    keys = [s.key for s in module.selections]
    drawn = any(s.kind == "drawn" for s in module.selections)
    drawn = drawn or any(e.op in DRAWING for e in walk(*roots, *keys))
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


# ---- costly -------------------------------------------------------------------------------------
# A warning for a spec that works on whole arrays and moves far more memory than it must.

FACTOR = 3.0  # times the least possible bytes; specs with products of matrices alone stay below


def cost_warnings(module: Module) -> list[Diagnostic]:
    """A warning at the first part that prevents fused passes, or none."""
    blamed = _cause(module)
    if blamed is None:
        return []
    traffic = traffic_of(module, with_states=bool(module.states))
    if traffic.moved <= FACTOR * traffic.least:
        return []
    span, cause, hint = blamed
    message = (
        f"warning: with {cause} this is computed an array at a time: {len(traffic.walks)} "
        f"walks over memory move {traffic.moved:.3g} bytes per element, where "
        f"{traffic.least:.3g} would do"
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


# ---- claims -------------------------------------------------------------------------------------

SIZE, DRAWS = 1000, 200
#: standard errors by which the mean of draws may be off, as a root mean square over elements: an
#: unbiased spec has 1, plus or minus a twentieth
OFF = 1.5
#: sizes that `when` is tried with
SIZES = (16, 100, 1000, 10_000)
Advice = tuple[str, str, str]  # section, message, hint
Trial = Callable[[Codec], Iterator[Advice]]
#: gradients with names
TRIED = (
    ("an ordinary gradient", np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)),
    ("a gradient of zeros, as of unused words,", np.zeros(SIZE, np.float32)),
)
#: hints for the first operator whose result is NaN or infinite
HINTS = {
    **dict.fromkeys(("log", "log2"), "log(x) is NaN below zero, and infinite at zero"),
    "sqrt": "sqrt(x) is NaN below zero",
    **dict.fromkeys(
        ("div", "floordiv"),
        "0 / 0 is NaN: divide by max(x, 1e-30), or take where(x > 0, a / x, 0)",
    ),
    "probit": "probit(p) is infinite at 0 and 1, and NaN outside",
}


def trial_warnings(codec: Codec, tried: Iterable[Trial]) -> list[Diagnostic]:
    """A warning for each claim in `tried` that data contradict; none if the codec does not take
    gradients of SIZE elements. codec: of the reference backend."""
    if not codec.suits(SIZE):
        return []
    advice: list[Advice] = []
    for each in tried:
        with suppress(CompllError):
            advice += each(codec)
    spans, path = codec.module.spans, codec.module.path
    return [
        Diagnostic(path, spans.get(section, Span()), f"warning: {message}", hint)
        for section, message, hint in advice
    ]


def finite(codec: Codec) -> Iterator[Advice]:
    """Warn of the first gradient that decodes to NaN or infinity."""
    for name, x in TRIED:
        payload = codec.encode(x, state=codec.init_state(SIZE) or None)
        if not np.isfinite(codec.decode(payload, SIZE)).all():
            with np.errstate(all="ignore"):
                section, cause, hint = culprit(codec, x)
            yield section, f"{name} decodes to NaN or infinity{cause}", hint
            return


def culprit(codec: Codec, x: F32) -> Advice:
    """The place where values become NaN or infinite: a field whose type does not hold its value,
    the operator of a binding, or decode."""
    module, run = codec.module, cast(Any, codec.backend).opened(x)
    lost = [f for f in module.fields if not np.isfinite(run.own_value(f)).all()]
    for f in lost:
        value = np.abs(run.value(f.expr))
        if np.isfinite(value).all():
            cause = f": {f.name!r} is up to {value.max():.4g}, and {f.storage} has no such number"
            return f"payload.{f.name}", cause, "scale it down, or use a type of a larger range"
    for name, expr in module.bindings.items() if lost else ():
        if number(expr) and not np.isfinite(run.value(expr)).all():
            first = next(e for e in walk(expr) if number(e) and not np.isfinite(run.value(e)).all())
            return f"encode.{name}", f": {name!r} is the first value to be so", hint_of(first)
    run.inputs |= {f.name: run.own_value(f) for f in module.fields}
    wrong = (e for e in walk(module.decode) if number(e) and not np.isfinite(run.value(e)).all())
    return "decode", "", hint_of(next(wrong, module.decode))


def number(expr: Expr) -> bool:
    """True for an expression with numbers as values."""
    return expr.type.dtype in ("float", "int") and expr.op != "param"


def hint_of(expr: Expr) -> str:
    """A hint for an operator whose result is NaN or infinite, where its arguments are not."""
    return HINTS.get(expr.op, f"{formula(expr)} is beyond what a float32 holds")


def gradients() -> dict[str, F32]:
    """Ordinary numbers, a fifth of them zeros; and the same with tiny numbers."""
    x = np.random.default_rng(1).standard_normal(SIZE)
    x[::5] = 0
    return {"gradients": x.astype(np.float32), "tiny gradients": (x * 1e-39).astype(np.float32)}


def unbiased(codec: Codec) -> Iterator[Advice]:
    """Warn if the mean of draws differs from x by more than its standard error explains. Tiny
    gradients may be lost: with `max(scale, 1e-30)` they survive too rarely for draws to show it."""
    if not codec.module.unbiased:
        return
    for name, x in gradients().items():
        draws = np.array([_decoded(codec, x, step) for step in range(DRAWS)], np.float64)
        error = np.linalg.norm(draws.mean(0) - x)
        expected = np.linalg.norm(draws.std(0, ddof=1)) / np.sqrt(DRAWS)
        size = np.linalg.norm(x.astype(np.float64))
        lost = 1.01 if name.startswith("tiny") else 1e-5
        if not error <= OFF * expected + lost * size:
            yield (
                "unbiased",
                f"`unbiased: true` does not hold for {name}: the mean of {DRAWS} draws is off by "
                f"{error / size:.2g} of their norm, where its standard error is "
                f"{expected / size:.2g}",
                "round by floor(x + random(0, 1)), keep x / p with probability p, or remove it",
            )
            return


def voted(codec: Codec) -> Iterator[Advice]:
    """Warn if a sum of votes, encoded again, does not keep its signs."""
    if not codec.vote:
        return
    rng = np.random.default_rng(1)
    votes = [_decoded(codec, rng.standard_normal(SIZE).astype(np.float32)) for _ in range(3)]
    total = np.sum(votes, axis=0).astype(np.float32)
    wrong = np.mean(np.sign(codec.decode(codec.encode(total), SIZE)) != np.sign(total))
    if wrong > 0:
        yield (
            "merge",
            f"`merge: vote` does not hold: of three votes, {wrong:.0%} of the elements are decided "
            "against the majority",
            "what is decoded, added up and encoded again must keep its sign",
        )


def kept(codec: Codec) -> Iterator[Advice]:
    """Warn if a selection's bound drops elements that meet its condition, and no state keeps
    them."""
    module = codec.module
    if codec.stateful:
        return
    counted = [s.name for s in module.selections if s.dynamic]
    if not counted:
        return
    most = limits(module, SIZE, codec.params)
    rng = np.random.default_rng(1)
    for name, x in (("normal", rng.standard_normal(SIZE)), ("Laplace", rng.laplace(size=SIZE))):
        head = _encoded(codec, x.astype(np.float32))[: 4 * len(counted)].view("<u4")
        for selection, count in zip(counted, head.tolist(), strict=True):
            if 0 < most[selection] < SIZE and count >= most[selection]:
                yield (
                    selection,
                    f"{selection!r} keeps {count} elements of {SIZE} with a {name} distribution, "
                    "as many as its bound allows: later elements that meet it are dropped",
                    "use a larger bound or a higher threshold",
                )
                return


def worth(codec: Codec) -> Iterator[Advice]:
    """Warn if `when` allows a tensor whose payload is longer than the tensor."""
    if codec.module.when is None:
        return
    rng = np.random.default_rng(1)
    for n in filter(codec.suits, SIZES):
        size = len(_encoded(codec, rng.standard_normal(n).astype(np.float32)))
        if size > 4 * n:
            yield (
                "when",
                f"`when` holds for {n} elements, whose payload of {size} bytes is longer than they "
                f"are themselves ({4 * n} bytes)",
                "use a condition that excludes such tensors",
            )
            return


def _encoded(codec: Codec, x: F32, step: int = 0) -> U8:
    with np.errstate(all="ignore"):
        return codec.encode(x, state=codec.init_state(len(x)) or None, seed=1, step=step)


def _decoded(codec: Codec, x: F32, step: int = 0) -> F32:
    with np.errstate(all="ignore"):
        return codec.decode(_encoded(codec, x, step), len(x), step=step)


CLAIMS: tuple[Trial, ...] = (unbiased, voted, kept, worth)
