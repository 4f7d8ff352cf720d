"""Payload fields as the reference writes and reads them, and checks of payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.reference import bitstreams, huffman, trits
from compll.errors import PayloadError
from compll.ir.expr import walk
from compll.ir.layout import header, limits
from compll.ir.matrices import extents
from compll.ir.module import Field, Module
from compll.ir.static import Number
from compll.numerics import numbers
from compll.numerics.bits import FORMATS, code
from compll.numerics.types import U8

WRITE: dict[str, Callable[[Any, int], U8]] = {
    "gaps": lambda positions, n: numbers.encode_gaps(positions),
    "golomb": bitstreams.encode_golomb,
}
_WHOLE = {"int32": "<i4", "uint32": "<u4", "uint16": "<u2", "byte": "u1"}
READ = {
    "gaps": numbers.decode_gaps,
    "golomb": bitstreams.decode_golomb,
}


def stored(field: Field, value: Any, tile: int, n: int) -> U8:
    """The bytes of a field with this value, for a tensor of n elements."""
    values = np.atleast_1d(np.asarray(value)).reshape(-1)
    if field.trits:
        packed = trits.pack(np.asarray(values, np.uint8), tile)
        return trits.shorten(packed) if field.storage == "runs" else packed
    if field.packed:
        most = field.most or (1 << field.bits) - 1
        if field.storage == "huffman":
            return huffman.encode(code(values, most), field.bits)
        return numbers.pack(code(values, most).astype(np.uint8), field.bits, tile)
    if field.storage in WRITE:
        return WRITE[field.storage](values, n)
    if field.storage == "float32":
        data: NDArray[Any] = values.astype("<f4")
    elif field.storage in FORMATS:
        one = FORMATS[field.storage]
        data = one.bits(values.astype(np.float32)).astype(f"<u{one.width // 8}")
    else:
        data = values.astype(np.float64).astype(np.int64).astype(_WHOLE[field.storage])
    return np.ascontiguousarray(data).view(np.uint8)


def read_counts(
    module: Module, params: Mapping[str, Number], payload: U8, n: int
) -> dict[str, int]:
    """The size of each selection of a payload. Raises PayloadError."""
    most, counts, at = limits(module, n, params), {}, 0
    for selection in module.selections:
        counts[selection.name] = most[selection.name]
        if selection.dynamic:
            if len(payload) < at + 4:
                raise PayloadError(f"{module.name}: a payload begins with 4 bytes per selection")
            count = int(payload[at : at + 4].view("<u4")[0])
            if count > most[selection.name]:
                raise PayloadError(
                    f"{module.name}: {count} selected elements, where at most "
                    f"{most[selection.name]} are possible"
                )
            counts[selection.name] = count
            at += 4
    return counts


def read_lengths(module: Module, payload: U8) -> dict[str, int]:
    """The bytes of each field of varying length. Raises PayloadError."""
    counted, gaps = header(module)
    head = payload[4 * len(counted) : 4 * (len(counted) + len(gaps))]
    if len(head) < 4 * len(gaps):
        raise PayloadError(f"{module.name}: a payload begins with 4 bytes per field of gaps")
    return dict(zip(gaps, np.ascontiguousarray(head).view("<u4").tolist(), strict=True))


def check_indices(
    module: Module, fields: Mapping[str, Any], n: int, kept: Mapping[str, int]
) -> None:
    """Raise PayloadError for positions of a scatter that do not ascend within the tensor.

    kept: how many elements each selection has.
    """
    for scatter in (e for e in walk(module.decode) if e.op == "scatter"):
        if scatter.args[0].op == "field":
            size = kept.get(scatter.type.of, n)
            if not (np.diff(fields[str(scatter.args[0].value)], prepend=-1, append=size) > 0).all():
                raise PayloadError(
                    f"{module.name}: an index lies outside the tensor of {size} elements, or is "
                    "not above the one before it"
                )


def loaded(field: Field, data: U8, n: int, tile: int, kept: int) -> Any:
    """The value of a field, from the start of `data`; kept: elements of its selection."""
    rows, cols = extents(field.dims, n) if field.shape == "matrix" else (0, 0)
    sizes = {"scalar": 1, "group": -(-n // tile), "n": n, "kept": kept, "table": 0}
    count = sizes.get(field.shape, rows * cols)
    if field.shape == "table":
        return np.ascontiguousarray(data[: 4 * int(field.of)]).view("<f4")
    if field.trits:
        return _trits(field, data, count, n, tile)
    if field.storage == "huffman":
        found = huffman.decode(data, count, field.bits)
        if found is None:
            raise PayloadError(f"{field.name!r} does not hold Huffman codes of {count} numbers")
        return found.astype(np.int32)
    if field.packed:
        codes = numbers.unpack(data, count, field.bits, tile).astype(np.int32)
        return codes.reshape(rows, cols) if field.shape == "matrix" else codes
    if field.storage in READ:
        positions = READ[field.storage](data, count)
        if positions is None:
            raise PayloadError(f"{field.name!r} does not hold {count} positions")
        return positions
    raw = np.ascontiguousarray(data[: count * field.item_bits // 8])
    if field.storage == "float32":
        values: Any = raw.view("<f4")
    elif field.storage in FORMATS:
        one = FORMATS[field.storage]
        values = one.value(raw.view(f"<u{one.width // 8}").astype(np.int32))
    else:
        values = raw.view(_WHOLE[field.storage]).astype(np.int64)
    if field.shape == "matrix":
        return values.reshape(rows, cols)
    return values[0] if field.shape == "scalar" else values


def _trits(field: Field, data: U8, count: int, n: int, tile: int) -> Any:
    size = field.layout.most_bytes(count, n, tile)
    full = trits.lengthen(data) if field.storage == "runs" else data[:size]
    if len(full) != size:
        raise PayloadError(f"{field.name!r} does not hold runs of {count} trits")
    return trits.unpack(full, count, tile).astype(np.int32)
