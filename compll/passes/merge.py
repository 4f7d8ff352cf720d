"""Neighbouring walks over the same elements become one, so that these are read once."""

from __future__ import annotations

from collections.abc import Iterable

from compll.ir.module import Field
from compll.ir.tile import Step, Value, Walk, order


def merged(steps: Iterable[Step]) -> list[Step]:
    """The steps, with walks put together where the later needs nothing that the earlier leaves."""
    found: list[Step] = []
    for step in steps:
        before = found[-1] if found else None
        if isinstance(step, Walk) and isinstance(before, Walk) and together(before, step):
            stores, folds = [*before.stores, *step.stores], [*before.folds, *step.folds]
            found[-1] = Walk(stores, list(dict.fromkeys(folds)), of=step.of, matrix=step.matrix)
        else:
            found.append(step)
    return found


def together(one: Walk, other: Walk) -> bool:
    """Whether two walks can be one."""
    if (one.of, one.matrix) != (other.of, other.matrix) or one.compacts or other.compacts:
        return False
    stores = [*one.stores, *other.stores]
    if any(s.placed for s in stores):
        return False
    if any(s.in_place for s in one.stores):
        return False  # what it overwrites, the other may read
    made = {id(s.field) for s in one.stores}
    folds = {id(f) for f in one.folds}
    return not any(needs(v, made, folds) for v in order(other.roots))


def needs(value: Value, made: set[int], folds: set[int]) -> bool:
    """Whether a value is read from what a walk stores, or follows from its totals."""
    reads = isinstance(value.attr, Field) and id(value.attr) in made
    return reads or (value.op == "total" and any(id(a) in folds for a in value.args))
