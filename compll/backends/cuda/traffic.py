"""Memory traffic of an encode's kernels on a device: all that they move, not the least."""

from __future__ import annotations

from collections.abc import Iterator

from compll.backends.cuda.searches import ROUNDS
from compll.backends.cuda.selected_lanes import counted, fold_of
from compll.backends.cuda.source import encodes
from compll.ir.matrices import mixes
from compll.ir.module import Field, Module
from compll.ir.tile import KthLargest, Step, Walk, walk_of
from compll.passes.kernel_traffic import traffic_of

WORD = 4.0  # bytes of an element, or of its key


def moved(module: Module, *, feed: bool) -> float:
    """Bytes that an encode without write-back moves for each element of a large gradient.

    A search for a k-th largest element reads keys once for each digit, and a walk that selects is
    there twice: it counts before it writes. Searches by counts are taken to end after one walk;
    steps behind a condition, samples, selected elements and what makes streams of variable length
    do not count.
    """
    if mixes(module):
        return traffic_of(module, feed=feed).moved
    kernel = encodes(module)["feed" if feed else "encode"]
    walks = (_read(one) + _written(one) for step in kernel.steps for one in _walks(step))
    keys = (WORD * (1 + len(ROUNDS)) for step in kernel.steps if _searches_all(step))
    return sum(walks) + sum(keys)


def _searches_all(step: Step) -> bool:
    return isinstance(step, KthLargest) and step.sample is None


def _walks(step: Step) -> Iterator[Walk]:
    """The walks over all elements that a step is on a device."""
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
    """Of an element; the gradient and what is laid aside have no field, or one without bits."""
    return array.item_bits / 8 if isinstance(array, Field) and array.item_bits else WORD
