"""Domains: sets of items that kernels run over, counted on the host."""

from __future__ import annotations

from collections.abc import Mapping

from compll.ir.expr import Expr
from compll.ir.layout import field_bytes, limits, tile_of
from compll.ir.matrices import extents
from compll.ir.module import Module
from compll.ir.static import Number, as_count, evaluate
from compll.ir.tile import Domain

#: bits of a stream that a thread reads, and number of these chunks in a group: as in streams.cuh
CHUNK, GROUP = 2048, 64


def items(domain: Domain, module: Module, params: Mapping[str, Number], n: int) -> int:
    """Items of a domain of a piece of n elements. Raises UsageError if a matrix is too large.

    kinds beside those of arrays: piece (one item, even without elements); sample (as many as
    `dims` says); trits (the packed bytes of field `of`); chunks and groups of chunks (of the most
    bits of field `of`); products (blocks of ROWS x COLUMNS elements of a matrix).
    """
    if domain.kind == "piece":
        return 1
    if n == 0 or domain.kind == "n":
        return n
    if domain.kind in ("trits", "chunks", "groups"):
        return _of_field(domain, module, params, n)
    if domain.kind == "kept":
        return limits(module, n, params)[domain.of]
    if domain.kind == "sample":
        return max(1, as_count(told(domain.dims[0], params, n), n))
    rows, cols = extents(domain.dims, n)
    return rows * cols if domain.kind == "matrix" else blocks(rows, cols)


def _of_field(domain: Domain, module: Module, params: Mapping[str, Number], n: int) -> int:
    """Bytes of a field of trits, or chunks of a stream of positions."""
    f = next(f for f in module.fields if f.name == domain.of)
    if domain.kind == "trits":
        return f.layout.most_bytes(n, n, tile_of(module))
    bits = 8 * field_bytes(f, module, n, limits(module, n, params))
    return -(-bits // (CHUNK if domain.kind == "chunks" else CHUNK * GROUP))


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


PIECE = Domain("piece")
