"""Warnings for specs that cannot train: the tutorial's own test, with a figure.

Equal gradients come one after the other. What receivers add up must follow them, by about their
size; feedback must deliver in the end what a payload leaves out; and states must not grow without
bound. A spec may have a scale of its own (a fixed threshold), so it fails only if it does so at
both SCALES.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from compll.ir.module import MEAN, REFERENCE, RESIDUAL, Field
from compll.numerics import halves
from compll.numerics.numbers import F32
from compll.runtime.codec import Codec

SIZE = 1000
SCALES = (1.0, 0.1)
#: equal gradients that every spec takes; with a state; and at most, until most elements had a turn
STEPS, LONG, MOST = 20, 100, 300
#: share of a field's codes that may be outside of its type's range
CLAMPED = 0.05
#: the least cosine of equal gradients with what is received: noise has up to 0.07
FOLLOWS = 0.1
#: what is received, as a multiple of the gradient; and its mean, as a part of its size, less the
#: gradient's
GAIN, SHIFT = 1.5, 0.3
#: growth in the second half of the steps: linear growth has 2, of which 1.46 is the most that a
#: sound residual showed; a state may grow with the steps, but not with their powers
LOST, UNBOUNDED = 1.75, 5.0
Advice = tuple[str, str, str]  # section, message, hint
F64 = NDArray[np.float64]


def trains(codec: Codec) -> Iterator[Advice]:
    """The first fault that keeps a spec from training. codec: of the reference backend."""
    x = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    with np.errstate(all="ignore"):
        trials = (Trial(codec, x * np.float32(scale)) for scale in SCALES)
        first = next(trials)
        fault = next(first.faults(), None)
        if fault is None or next(next(trials).faults(), None) is None:
            fault = first.course.diverged() or (None if fault else multiplied(first, trials))
    yield from (fault,) if fault else ()


def multiplied(first: Trial, others: Iterator[Trial]) -> Advice | None:
    """Advice for a spec that decodes to a multiple of gradients of any size. Momentum may do so,
    and signs have a size of their own."""
    codec, share = first.codec, first.multiple
    kept = any(s.name not in (RESIDUAL, REFERENCE, MEAN) for s in codec.states)
    if share <= GAIN or kept or not math.isclose(share, next(others).multiple, rel_tol=0.1):
        return None
    message = f"{STEPS} equal gradients decode to {share:.2g} times what they are"
    return "decode", message, f"divide by {share:.2g} in decode: learning rates are the gradient's"


class Trial:
    """Equal gradients of one size, x. alone: the sum of what is received of those that come
    without a state."""

    def __init__(self, codec: Codec, x: F32) -> None:
        self.codec, self.x, self.course = codec, x, Course(codec, x)

    @cached_property
    def alone(self) -> F64:
        if not self.codec.stateful:
            self.course.go(STEPS)
            return self.course.early
        each = (Course(self.codec, self.x, step) for step in range(STEPS))
        total: F64 = np.sum([run.go(run.step + 1) for run in each], axis=0)
        return total

    @property
    def multiple(self) -> float:
        """The multiple of a gradient that is received, if it comes alone."""
        x = self.x.astype(np.float64)
        return float(self.alone @ x / (x @ x)) / STEPS

    def faults(self) -> Iterator[Advice]:
        """Faults that the gradient shows, the most telling first."""
        x, course = self.x, self.course
        yield from clamped(self.codec, x)
        course.go(STEPS)
        if not course.early.any():
            hint = "use the payload's values in decode"
            yield "decode", f"{STEPS} equal gradients decode to zeros", hint
        if cosine(self.alone, x) < -FOLLOWS:
            message = f"{STEPS} equal gradients decode to values that point away from them: "
            yield "decode", message + off(self.alone, x), "a sign is inverted, in encode or decode"
        if self.codec.stateful:
            share = course.sent / (STEPS * SIZE)
            enough = 3 / share if share else math.inf
            course.go(math.ceil(min(MOST, max(LONG, enough))))
            yield from grown(course, enough=enough <= MOST)
        shift = shifted(course.early) - shifted(x)
        if abs(shift) > SHIFT:
            message = (
                f"{STEPS} equal gradients decode to values that are shifted: their mean is off "
            )
            message += f"by {shift:.2g} of their size, and {off(course.early, x)}"
            yield "decode", message, "take away in decode the offset that encode adds"
        if cosine(course.early, x) < FOLLOWS:
            message = f"{STEPS} equal gradients decode to values that hardly follow them: "
            hint = "compare decode with encode: order, signs and scales"
            yield "decode", message + off(course.early, x), hint


def clamped(codec: Codec, x: F32) -> Iterator[Advice]:
    """Fields with codes outside of their type's range, which are clamped."""
    run = cast(Any, codec.backend).opened(x)
    for f in codec.module.fields:
        if not f.packed or f.layout.trits or f.expr is None:
            continue
        most, codes = f.most or (1 << f.bits) - 1, np.asarray(run.value(f.expr), np.float64)
        some = max(1, codes.size)  # a selection may be empty
        above, below = (np.sum(beyond) / some for beyond in (codes >= most + 1, codes < 0))
        if max(above, below) > CLAMPED:
            share, held = (above, most) if above >= below else (below, 0)
            side = f"above {most}, up to {np.max(codes):.4g}," if held else "below 0"
            message = (
                f"{f.name!r} is {side} for {share:.0%} of the elements, which are held as {held}"
            )
            yield f"payload.{f.name}", message, "use a type of more bits, or other levels"


class Course:
    """Equal gradients through a codec with its states. received: the sum of what receivers take;
    sizes: norms of the states after each step."""

    def __init__(self, codec: Codec, x: F32, step: int = 0) -> None:
        self.codec, self.x, self.step, self.sent = codec, x, step, 0
        self.state = codec.init_state(SIZE)
        self.received, self.mean = np.zeros(SIZE), np.zeros(SIZE)
        self.early = self.received
        self.sizes: dict[str, list[float]] = {s.name: [] for s in codec.states}

    def go(self, end: int) -> F64:
        """Take gradients in, up to step `end`; returns the sum of what was received."""
        for step in range(self.step, end):
            payload = self.codec.encode(self.x, state=self.state or None, seed=1, step=step)
            decoded = self.codec.decode(payload, SIZE, step=step).astype(np.float64)
            self.sent += int(np.count_nonzero(decoded))
            self.received = self.received + self.mean + decoded
            if self.codec.difference is not None:  # receivers hold the references' mean
                self.mean = self.mean + self.codec.difference * decoded
            for name, values in self.state.items():
                self.sizes[name].append(
                    float(np.linalg.norm(halves.read(values).astype(np.float64)))
                )
        self.step = end
        if end == STEPS:
            self.early = self.received
        return self.received

    def growth(self, name: str, end: int) -> float:
        """The largest norm of a state up to step `end`, as a multiple of that in the first half."""
        sizes, least = self.sizes[name][:end], float(np.linalg.norm(self.x))
        return max(sizes) / max(*sizes[: end // 2], least)

    def diverged(self) -> Advice | None:
        """Advice if NaN or infinity is among the values received."""
        if np.isfinite(self.received).all():
            return None
        message = f"{self.step} equal gradients decode to NaN or infinity in the end"
        return "decode", message, "a state grows without bound, or is divided by when it is 0"


def grown(course: Course, *, enough: bool) -> Iterator[Advice]:
    """States that grow without bound. enough: there were steps for each element to be sent."""
    for s in course.codec.states:
        # soon, too: a state that doubles meets the bound of all states within 50 steps
        growth, end = max((course.growth(s.name, end), end) for end in (STEPS, course.step))
        lost = owed(s) and enough and course.growth(s.name, course.step) > LOST
        times = f"grows {growth:.2g} times from step {end // 2} to {end} of equal gradients"
        if lost or (owed(s) and growth > UNBOUNDED):
            section = "feedback" if s.name == RESIDUAL else f"update.{s.name}"
            message = f"what is left out is lost for good: {s.name!r} {times}"
            yield (
                section,
                message,
                (
                    "what decode gives must be nearer to what encode took in than zero is: compare "
                    "signs, scales and the range of codes"
                ),
            )
        elif growth > UNBOUNDED:
            message = f"state {s.name!r} grows without bound: it {times}"
            yield f"update.{s.name}", message, "let it forget, like 0.9 * m + 0.1 * g"


def owed(state: Field) -> bool:
    """True for a state that keeps gradient for later."""
    return state.name == RESIDUAL or state.gradient != 0


def cosine(mean: F64, x: F32) -> float:
    """The cosine of what is received with the gradient."""
    lengths = float(np.linalg.norm(mean)) * float(np.linalg.norm(x.astype(np.float64)))
    return float(mean @ x) / lengths if lengths else 0.0


def shifted(values: NDArray[Any]) -> float:
    """The mean as a part of the root mean square."""
    values = values.astype(np.float64)
    return float(values.mean() / np.sqrt((values**2).mean()))


def off(total: F64, x: F32) -> str:
    """The distance of the mean received from the gradient, in words."""
    error = np.linalg.norm(total / STEPS - x) / np.linalg.norm(x)
    return f"the mean received is off by {error:.2g} of their norm"
