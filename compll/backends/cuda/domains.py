"""Domains: sets of items that kernels run over, counted on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compll.ir.expr import Expr
from compll.ir.layout import field_bytes, limits, tile_of
from compll.ir.matrices import extents
from compll.ir.module import Module
from compll.ir.static import Number, as_count, evaluate

#: bits of a stream that a thread reads, and number of these chunks in a group: as in streams.cuh
CHUNK, GROUP = 2048, 64


@dataclass(frozen=True)
class Domain:
    """A set of items of every piece.

    kind: n (elements); kept (the most elements of selection `of`); sample (`of` elements); matrix
    (of `dims`); trits (the packed bytes of field `of`); chunks and groups of chunks (of the most
    bits of field `of`); lanes (of sums by index); bins (`of` bins); products (blocks of ROWS x
    COLUMNS elements of a matrix); piece (one item, even without elements).
    """

    kind: str
    of: Expr | int | str = ""
    dims: tuple[Expr, ...] = ()

    def count(self, module: Module, params: Mapping[str, Number], n: int) -> int:
        """Items of a piece of n elements. Raises UsageError if a matrix is too large."""
        if self.kind == "piece":
            return 1
        if n == 0 or self.kind == "n":
            return n
        if self.kind in ("trits", "chunks", "groups"):
            return self.of_field(module, params, n)
        if self.kind == "kept":
            return limits(module, n, params)[str(self.of)]
        if self.kind == "sample":
            return max(1, as_count(told(self.of, params, n), n))
        rows, cols = extents(self.dims, n)
        return rows * cols if self.kind == "matrix" else blocks(rows, cols)

    def of_field(self, module: Module, params: Mapping[str, Number], n: int) -> int:
        """Bytes of a field of trits, or chunks of a stream of positions."""
        f = next(f for f in module.fields if f.name == self.of)
        if self.kind == "trits":
            return f.layout.most_bytes(n, n, tile_of(module))
        bits = 8 * field_bytes(f, module, n, limits(module, n, params))
        return -(-bits // (CHUNK if self.kind == "chunks" else CHUNK * GROUP))


def told(number: object, params: Mapping[str, Number], n: int) -> float:
    """A number of a spec that does not depend on the step."""
    if isinstance(number, Expr):
        return float(evaluate(number, dict(params) | {"n": n, "step": 0}))
    return float(str(number))


#: elements of a product that a block computes: as in arrays.cuh
ROWS, COLUMNS = 32, 64


def blocks(rows: int, cols: int) -> int:
    """The number of blocks of ROWS x COLUMNS elements."""
    return -(-rows // ROWS) * -(-cols // COLUMNS)


ELEMENTS, PIECE = Domain("n"), Domain("piece")
