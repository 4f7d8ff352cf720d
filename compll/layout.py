"""The bytes of a payload, known up to the selections' sizes before any data.

[Note: packing] A packed array travels in tiles of TILE elements (in a grouped spec: one group).
A tile of m elements of b bits takes w = ceil(m * b / 8) bytes; element i sits in byte i mod w at
bit b * (i div w). So neighbouring bytes come from neighbouring elements, and packing is a few
full-width vector operations on a CPU and coalesced on a GPU.

A payload is: a uint32 count per filter selection, a uint32 length in bytes per field of gaps or
runs, then the fields in the order of `payload:` (those of varying length
last), then the status byte where strict.py finds that one is needed. Numbers are
little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compll.ir import Field, Module
from compll.static import Number, as_count, evaluate

TILE = 1024


def tile_of(module: Module) -> int:
    """Elements per tile: the group, or TILE."""
    return module.group or TILE


def packed_bytes(field: Field, count: int, tile: int) -> int:
    """Bytes of `count` packed values (at most, of runs)."""
    full, rest = divmod(count, tile)
    return full * field.packed_bytes(tile) + field.packed_bytes(rest)


def gap_bytes(count: int, n: int) -> int:
    """The most bytes that the gaps between `count` of n positions take.

    A gap is the number of elements skipped, 7 bits a byte, the eighth tells that more follow
    (LEB128). Gaps sum to less than n, so at most n / 128 of them need a second byte.
    """
    return count + sum(min(count, n >> shift) for shift in (7, 14, 21, 28, 35))


def field_bytes(field: Field, module: Module, n: int, kept: int) -> int:
    """Bytes of one field, for `kept` selected elements where it runs over a selection."""
    if field.storage == "gaps":
        return gap_bytes(kept, n)
    tile = tile_of(module)
    if field.shape == "table":
        return 4 * int(field.of)
    count = {"scalar": 1, "group": -(-n // tile), "n": n, "kept": kept}[field.shape]
    if field.packed:
        return packed_bytes(field, count, tile)
    return count * field.item_bits // 8


@dataclass(frozen=True)
class Layout:
    """Where the fields of a payload begin, for a tensor of n elements and these selection sizes."""

    starts: tuple[int, ...]
    total: int
    counts: tuple[int, ...]


def limits(module: Module, n: int, params: Mapping[str, Number]) -> dict[str, int]:
    """The most elements each selection can have."""
    env = dict(params) | {"n": n, "step": 0}
    return {s.name: as_count(evaluate(s.limit, env), n) for s in module.selections}


def header(module: Module) -> tuple[list[str], list[str]]:
    """What a payload begins with: names of counted selections, and of fields of varying length."""
    counted = [s.name for s in module.selections if s.dynamic]
    return counted, [f.name for f in module.fields if f.storage in ("gaps", "runs")]


def layout(
    module: Module, n: int, kept: Mapping[str, int], lengths: Mapping[str, int] | None = None
) -> Layout:
    """The layout for selections of these sizes, and fields of these lengths (else the most)."""
    known = lengths or {}
    at = 4 * sum(map(len, header(module)))
    starts = []
    for field in module.fields:
        starts.append(at)
        at += known.get(field.name, field_bytes(field, module, n, kept.get(field.of, 0)))
    total = (at + module.status) if n else 0
    return Layout(tuple(starts), total, tuple(kept[s.name] for s in module.selections))


def payload_bytes(module: Module, n: int, params: Mapping[str, Number]) -> int:
    """The most bytes that a payload of n elements can take."""
    return layout(module, n, limits(module, n, params)).total


def is_fixed(module: Module) -> bool:
    """Whether the payload's length depends on n alone."""
    return not any(header(module))
