"""Large expressions: what occurs in one more than once becomes a statement before it.

A compiler would find the repetitions by itself, but only after it has read, typed and lowered each
of them: int8_dettmers took NVRTC 5 s an architecture instead of 1.
"""

from __future__ import annotations

from collections.abc import Callable

from compll.ir.expr import Expr

#: operators that written out in full make an expression large
LARGE = 64


def repeated(root: Expr, given: Callable[[Expr], bool]) -> list[Expr]:
    """What a large expression holds twice or more, arguments first; [] for a small one.

    `given` tells values that have a name anyway.
    """
    sizes: dict[int, int] = {}
    uses: dict[int, int] = {}
    order: list[Expr] = []

    def size(e: Expr) -> int:
        uses[id(e)] = uses.get(id(e), 0) + 1
        if id(e) not in sizes:
            inner = () if given(e) else e.args
            sizes[id(e)] = bool(inner) + sum(map(size, inner))
            if inner:
                order.append(e)
        return sizes[id(e)]

    if size(root) < LARGE:
        return []
    return [e for e in order if uses[id(e)] > 1 and sizes[id(e)] > 1]
