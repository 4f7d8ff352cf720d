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

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from compll.ir import exclusive
from compll.ir.matrices import extents
from compll.ir.module import Field, Module, Selection
from compll.ir.static import Number, as_count, evaluate

TILE = 1024
#: the number of the payload format: it changes whenever bytes of a payload get another meaning, be
#: it by their layout, by an operator or by draws. The digest of a codec contains it, and ranks with
#: different numbers do not train together.
FORMAT = 1


def tile_of(module: Module) -> int:
    """Elements per tile: the group, or TILE."""
    return module.group or TILE


def items(field: Field, n: int, tile: int, kept: int) -> int:
    """Values of a field of a tensor of n elements, of whose selection `kept` are."""
    if field.shape == "matrix":
        return math.prod(extents(field.dims, n))
    counts = {"scalar": 1, "group": -(-n // tile), "n": n, "kept": kept}
    return int(field.of) if field.shape == "table" else counts[field.shape]


def field_bytes(field: Field, module: Module, n: int, kept: Mapping[str, int]) -> int:
    """Bytes of one field, for so many `kept` elements of each selection."""
    tile, among = tile_of(module), module.among(field.of)
    count = items(field, n, tile, kept.get(field.of, 0))
    return field.layout.most_bytes(count, kept[among] if among else n, tile)


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
) -> list[int]:
    """Starts of the payload's parts in bytes, and its end, for selections of these sizes, and
    fields of these lengths (else the most). A tensor without elements has an empty payload."""
    known = lengths or {}
    head = 4 * sum(map(len, header(module)))
    found = starts(module, head, lambda f: known.get(f.name, field_bytes(f, module, n, kept)))
    return found if n else [0]


def starts(module: Module, head: int, bytes_of: Callable[[Field], Any]) -> list[Any]:
    """Starts of the payload's parts behind a header of `head` bytes, and its end. bytes_of: those
    of a part, as an int or as a Number of a program (see numerics/traced.py)."""
    return list(accumulate(map(bytes_of, module.parts), initial=head))


def payload_bytes(module: Module, n: int, params: Mapping[str, Number]) -> int:
    """The most bytes that a payload of n elements can take."""
    most = limits(module, n, params)
    longest = exclusive.longest(module, most, lambda kept: layout(module, n, kept)[-1])
    return longest + (exclusive.roundings(module) if n else 0)


def is_fixed(module: Module) -> bool:
    """True if the payload's length depends on n alone."""
    return not any(header(module))
