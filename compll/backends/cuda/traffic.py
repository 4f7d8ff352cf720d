"""Memory traffic of an encode's kernels on a device: all bytes moved, not the least."""

from __future__ import annotations

from compll.backends.cuda.searches import ROUNDS
from compll.backends.cuda.selected_lanes import counted, fold_of
from compll.ir.module import Module
from compll.ir.tile import Op, Search, Walk, When
from compll.passes import lower
from compll.passes.traffic import WORD, Sizes


def moved(module: Module, *, feed: bool) -> float:
    """Bytes that an encode without write-back moves for each element of a large gradient.

    A search for the k-th largest element reads keys once for each digit, and a walk that selects
    runs twice: it counts before it writes. A search by counts is assumed to end after one walk.
    Steps under a condition, samples, selected elements and work on streams of varying length are
    not counted.
    """
    kernel = lower.encode(module, feed)
    sizes, total = Sizes(kernel), 0.0
    for step in kernel.steps:
        if isinstance(step, When):
            continue
        for one in (*counts(step), step):
            walk = sizes.walk(one)
            total += walk.read + walk.written if walk else 0.0
        if isinstance(step, Search) and step.how == "kth_largest" and step.sample is None:
            total += WORD * (len(ROUNDS) - 1)
    return total


def counts(step: Op) -> list[Op]:
    """The walk that counts lanes before a walk that selects some."""
    conditions = counted(step) if isinstance(step, Walk) else []
    found = [Walk(folds=[fold_of(one.condition) for one in conditions])] if conditions else []
    return [*found]
