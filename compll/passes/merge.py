"""Neighbouring walks over the same elements merge, so that the elements are read once."""

from __future__ import annotations

from collections.abc import Iterable

from compll.ir.module import Field
from compll.ir.tile import Op, Value, Walk, order


def merged(steps: Iterable[Op]) -> list[Op]:
    """The steps, with neighbouring walks merged if the later needs no result of the earlier."""
    found: list[Op] = []
    for step in steps:
        before = found[-1] if found else None
        if isinstance(step, Walk) and isinstance(before, Walk) and together(before, step):
            stores, folds = [*before.stores, *step.stores], [*before.folds, *step.folds]
            found[-1] = Walk(stores, list(dict.fromkeys(folds)), of=step.of, matrix=step.matrix)
        else:
            found.append(step)
    return found


def together(one: Walk, other: Walk) -> bool:
    """True if two walks can be one."""
    if (one.of, one.matrix) != (other.of, other.matrix) or one.compacts or other.compacts:
        return False
    stores = [*one.stores, *other.stores]
    if any(s.placed for s in stores):
        return False
    if any(s.in_place for s in one.stores):
        return False  # the other may read what this one overwrites
    made = {id(s.field) for s in one.stores}
    folds = {id(f) for f in one.folds}
    return not any(needs(v, made, folds) for v in order(other.roots))


def needs(value: Value, made: set[int], folds: set[int]) -> bool:
    """True if a value is read from an array in `made`, or depends on a total of `folds`."""
    reads = isinstance(value.attr, Field) and id(value.attr) in made
    return reads or (value.op == "total" and any(id(a) in folds for a in value.args))
