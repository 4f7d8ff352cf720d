"""Memory traffic of an encode's kernels on a device: all bytes moved, not the least."""

from __future__ import annotations

from collections.abc import Iterator

from compll.backends.cuda.searches import ROUNDS
from compll.backends.cuda.selected_lanes import counted, fold_of
from compll.backends.cuda.source import encodes
from compll.ir.matrices import mixes
from compll.ir.module import Field, Module
from compll.ir.tile import KthLargest, Op, Walk, walk_of
from compll.passes.kernel_traffic import traffic_of

WORD = 4.0  # bytes of an element or its key


def moved(module: Module, *, feed: bool) -> float:
    """Bytes that an encode without write-back moves for each element of a large gradient.

    A search for the k-th largest element reads keys once for each digit, and a walk that selects
    runs twice: it counts before it writes. A search by counts is assumed to end after one walk.
    Steps under a condition, samples, selected elements and work on streams of varying length are
    not counted.
    """
    if mixes(module):
        return traffic_of(module, feed=feed).moved
    kernel = encodes(module)["feed" if feed else "encode"]
    walks = (_read(one) + _written(one) for step in kernel.steps for one in _walks(step))
    keys = (WORD * (1 + len(ROUNDS)) for step in kernel.steps if _searches_all(step))
    return sum(walks) + sum(keys)


def _searches_all(step: Op) -> bool:
    return isinstance(step, KthLargest) and step.sample is None


def _walks(step: Op) -> Iterator[Walk]:
    """The walks over all elements that a device makes for a step."""
    walk = walk_of(step)
    sampled = isinstance(step, KthLargest) and step.sample is not None
    if walk is None or walk.of or sampled:
        return
    if isinstance(step, Walk) and (conditions := counted(step)):
        yield Walk(folds=[fold_of(one.condition) for one in conditions])
    yield walk


def _read(walk: Walk) -> float:
    loads = {id(v.attr): v.attr for v in walk.values if v.op == "load" and v.level == "lane"}
    return sum(_bytes(each) for each in loads.values())


def _written(walk: Walk) -> float:
    return sum(_bytes(s.field) for s in walk.stores if s.value.level == "lane" and not s.back)


def _bytes(array: object) -> float:
    """Bytes of an element. The gradient and scratch arrays have no field, or one without bits."""
    return array.item_bits / 8 if isinstance(array, Field) and array.item_bits else WORD
