"""Parameters that depend on a tensor's shape: one with `from:` takes its value from it, unless
given.

Codecs see flat tensors; a caller who knows the shape asks for the codec of that shape first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from compll.frontend.spec import Param

Shape = Sequence[int]
#: sources of a parameter: sides of the matrix that has a tensor's first axis as rows
SIDES: dict[str, Callable[[Shape], int]] = {
    "rows": lambda shape: shape[0] if shape else 1,
    "columns": lambda shape: math.prod(shape[1:]),
}


def open_params(params: Iterable[Param], given: Iterable[str]) -> tuple[Param, ...]:
    """Parameters that a shape may still set."""
    chosen = set(given)
    return tuple(p for p in params if p.side and p.name not in chosen)


def settled(open_: Iterable[Param], shape: Shape) -> Mapping[str, int]:
    """Values from a shape. A parameter that does not allow its value keeps the default."""
    values = {p.name: (p, SIDES[p.side](shape)) for p in open_}
    return {name: value for name, (p, value) in values.items() if p.check(value) is None}
