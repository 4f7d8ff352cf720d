"""The bytes of a payload, known up to the selections' sizes before any data.

[Note: packing] A packed array travels in tiles of TILE elements (in a grouped spec: one group).
A tile of m elements of b bits takes w = ceil(m * b / 8) bytes; element i sits in byte i mod w at
bit b * (i div w). So neighbouring bytes come from neighbouring elements, and packing is a few
full-width vector operations on a CPU and coalesced on a GPU.

A payload is: a uint32 count per filter selection, a uint32 length in bytes per field of varying
length, then the fields in the order of `payload:` (those of varying length last), then the status
byte where strict.py finds that one is needed. Numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compll.ir import exclusive
from compll.ir.matrices import extents
from compll.ir.module import Field, Module, Selection
from compll.ir.static import Number, as_count, evaluate

TILE = 1024


def tile_of(module: Module) -> int:
    """Elements per tile: the group, or TILE."""
    return module.group or TILE


def field_bytes(field: Field, module: Module, n: int, kept: Mapping[str, int]) -> int:
    """Bytes of one field, for so many `kept` elements of each selection."""
    tile = tile_of(module)
    if field.shape == "table":
        return 4 * int(field.of)
    if field.shape == "matrix":
        rows, cols = extents(field.dims, n)
        return field.layout.most_bytes(rows * cols, n, tile)
    if field.shape == "kept":
        among = module.among(field.of)
        return field.layout.most_bytes(kept[field.of], kept[among] if among else n, tile)
    count = {"scalar": 1, "group": -(-n // tile), "n": n}[field.shape]
    return field.layout.most_bytes(count, n, tile)


@dataclass(frozen=True)
class Layout:
    """Starts of a payload's fields in bytes, for a tensor of n elements and given selection
    sizes."""

    starts: tuple[int, ...]
    total: int
    counts: tuple[int, ...]


def limits(module: Module, n: int, params: Mapping[str, Number]) -> dict[str, int]:
    """The most elements of each selection, by its name."""
    return {s.name: limit(s, params, n) for s in module.selections}


def limit(selection: Selection, params: Mapping[str, Number], n: int) -> int:
    """The most elements of a selection from a tensor of n. A drawn selection needs no `params`: its
    limit holds their values."""
    return as_count(evaluate(selection.limit, dict(params) | {"n": n, "step": 0}), n)


def header(module: Module) -> tuple[list[str], list[str]]:
    """Names of the counts and lengths that a payload begins with: counted selections, and fields of
    varying length."""
    counted = [s.name for s in module.selections if s.dynamic]
    return counted, [f.name for f in module.fields if f.layout.varying]


def layout(
    module: Module, n: int, kept: Mapping[str, int], lengths: Mapping[str, int] | None = None
) -> Layout:
    """The layout for selections of these sizes, and fields of these lengths (else the most)."""
    known = lengths or {}
    at = 4 * sum(map(len, header(module)))
    starts = []
    for field in module.fields:
        starts.append(at)
        at += known.get(field.name, field_bytes(field, module, n, kept))
    total = (at + module.status) if n else 0
    return Layout(tuple(starts), total, tuple(kept[s.name] for s in module.selections))


def payload_bytes(module: Module, n: int, params: Mapping[str, Number]) -> int:
    """The most bytes that a payload of n elements can take."""
    most = limits(module, n, params)
    longest = exclusive.longest(module, most, lambda kept: layout(module, n, kept).total)
    return longest + (exclusive.roundings(module) if n else 0)


def is_fixed(module: Module) -> bool:
    """True if the payload's length depends on n alone."""
    return not any(header(module))
