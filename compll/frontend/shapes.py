"""What a tensor's shape says to a spec: a parameter with `from:` that is not given follows from it.

Codecs see tensors flat; whoever knows the shape asks for the codec of that shape first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from compll.frontend.spec import Param

Shape = Sequence[int]
#: what a parameter may be taken from: the matrix of a tensor with its first axis as rows
SIDES: dict[str, Callable[[Shape], int]] = {
    "rows": lambda shape: shape[0] if shape else 1,
    "columns": lambda shape: math.prod(shape[1:]),
}


def open_params(params: Iterable[Param], given: Iterable[str]) -> tuple[Param, ...]:
    """The parameters that a shape may yet settle."""
    chosen = set(given)
    return tuple(p for p in params if p.side and p.name not in chosen)


def settled(open_: Iterable[Param], shape: Shape) -> Mapping[str, int]:
    """Values from a shape; a parameter that may not have its value keeps its default."""
    values = {p.name: (p, SIDES[p.side](shape)) for p in open_}
    return {name: value for name, (p, value) in values.items() if p.check(value) is None}
