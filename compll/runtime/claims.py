"""Warnings for specs that break their claims: `unbiased`, `merge: vote`, `when` and bounds of
selections are tried on data, and warnings give figures (`merge: sum` is proved); or that decode a
common gradient to NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

import numpy as np

from compll.errors import CompllError, Diagnostic, Span
from compll.ir.expr import Expr, formula, walk
from compll.ir.layout import limits
from compll.numerics.types import F32, U8
from compll.runtime.codec import Codec

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


def warnings(codec: Codec, tried: Iterable[Trial]) -> list[Diagnostic]:
    """A warning for each claim in `tried` that data contradict; none if the codec does not take
    gradients of SIZE elements. codec: of the reference backend."""
    if not codec.suits(SIZE):
        return []
    found: list[Advice] = []
    for each in tried:
        with suppress(CompllError):
            found += each(codec)
    spans, path = codec.module.spans, codec.module.path
    return [
        Diagnostic(path, spans.get(section, Span()), f"warning: {message}", hint)
        for section, message, hint in found
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
