"""Arrays as matrices: see View in arrays.cuh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import Domain
from compll.ir.expr import Expr
from compll.ir.module import Field


@dataclass(frozen=True)
class View:
    """An array in memory. pointer: of a kernel, where it begins; dims: rows and columns; domain: the
    elements that are there, others are zero; turned: whether a row's elements lie apart, as columns'
    do in others; memory: the array of the plan's own whose elements in order these are, if any."""

    pointer: Callable[[Body], str]
    kind: str
    dims: tuple[Expr, ...]
    domain: Domain
    turned: bool = False
    memory: Field | None = None

    def text(self, b: Body, dims: tuple[Expr, ...] | None = None) -> str:
        """In a kernel; dims: of a matrix in which rows or columns of one repeat."""
        if not self.dims:
            only = f"{self.pointer(b)}, 1, {b.count(self.domain)}, 0, 1, {b.count(self.domain)}"
            return named(b, self.kind, only)
        wanted = self.dims if dims is None else dims
        rows, cols = map(b.dim, wanted)
        own = [b.dim(d) for d in self.dims]
        down, across = ("1", own[0]) if self.turned else (own[1], "1")
        strides = [
            "0" if one == "1" and all_ != "1" else step
            for one, all_, step in zip(own, (rows, cols), (down, across), strict=True)
        ]
        given = f"{self.pointer(b)}, {rows}, {cols}, {', '.join(strides)}, {b.count(self.domain)}"
        return named(b, self.kind, given)


def named(b: Body, kind: str, given: str) -> str:
    """The name of a view in a kernel."""
    if ("view", given) not in b.named:
        name = b.name("view")
        b.hoist(name, f"const View<{kind}> {name} = {{{given}}};")
        b.named["view", given] = name
    return b.named["view", given]
