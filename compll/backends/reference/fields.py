"""Payload fields as the reference writes and reads them, and checks of payloads.

[Note: trits] A tile of m values takes w = ceil(m / 5) bytes; value i is the digit of byte i mod w
with weight 3**(4 - i div w), and digits beyond m are 1. So bytes are below 243, and a byte of ones
is 121.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from compll.backends.reference import routines
from compll.errors import PayloadError
from compll.ir.expr import walk
from compll.ir.layout import families, header, items, limits, tile_of
from compll.ir.module import POSITIONS, Field, Module
from compll.ir.static import Number, extents
from compll.numerics import numbers
from compll.numerics.bits import FORMATS, Format, code
from compll.numerics.numbers import U8


class PayloadType(NamedTuple):
    """write: the bytes of a field's values, from a tensor of n elements in tiles. read: a number of
    values from bytes; None if these are not so many `values`."""

    write: Callable[[Field, Any, int, int], U8]
    read: Callable[[Field, U8, int, int, int], Any]
    values: str = ""


def _plain(dtype: str, bits: Callable[[Any], Any], value: Callable[[Any], Any]) -> PayloadType:
    """Values with bytes of their own: a function from them to a NumPy type, and its inverse."""
    size = np.dtype(dtype).itemsize
    return PayloadType(
        lambda f, x, n, tile: np.ascontiguousarray(bits(x).astype(dtype)).view(np.uint8),
        lambda f, data, count, n, tile: value(
            np.ascontiguousarray(data[: count * size]).view(dtype)
        ),
    )


def _short_float(form: Format) -> PayloadType:
    return _plain(
        f"<u{form.width // 8}",
        lambda x: form.bits(x.astype(np.float32)), lambda raw: form.value(raw.astype(np.int32)),
    )  # fmt: skip


def _integer(dtype: str) -> PayloadType:
    return _plain(
        dtype, lambda x: x.astype(np.float64).astype(np.int64), lambda raw: raw.astype(np.int64)
    )


def _codes(f: Field, values: Any) -> Any:
    return code(values, f.most or (1 << f.bits) - 1)


#: weights of the trits of a byte
WEIGHTS = np.array([81, 27, 9, 3, 1], np.uint8)[:, None]


def pack_trits(codes: Any, tile: int) -> U8:
    """Trits as bytes, tile after tile."""
    return numbers.pack_digits(codes.astype(np.uint8), WEIGHTS, 1, tile)


def unpack_trits(data: U8, count: int, tile: int) -> U8:
    """Inverse of pack_trits."""
    return numbers.unpack_digits(data, count, WEIGHTS, 3, tile)


def _write_runs(f: Field, x: Any, n: int, tile: int) -> U8:
    data = pack_trits(x, tile)
    return routines.stored(f.layout, data, n, len(data))


def _read_runs(f: Field, data: U8, count: int, n: int, tile: int) -> U8 | None:
    full = routines.loaded(f.layout, data, f.layout.most_bytes(count, n, tile), n)
    return None if full is None else unpack_trits(full, count, tile)


TYPES = {
    "float32": _plain("<f4", np.asarray, np.asarray),
    "int32": _integer("<i4"), "uint32": _integer("<u4"), "uint16": _integer("<u2"),
    "byte": _integer("u1"), **{name: _short_float(form) for name, form in FORMATS.items()},
    "uint": PayloadType(
        lambda f, x, n, tile: numbers.pack(_codes(f, x).astype(np.uint8), f.bits, tile),
        lambda f, data, count, n, tile: numbers.unpack(data, count, f.bits, tile)),
    "trit": PayloadType(
        lambda f, x, n, tile: pack_trits(x, tile),
        lambda f, data, count, n, tile: unpack_trits(data, count, tile)),
    "runs": PayloadType(_write_runs, _read_runs, "runs of {} trits"),
    "huffman": PayloadType(
        lambda f, x, n, tile: routines.stored(
            f.layout, _codes(f, x), f.bits, f.layout.most_bytes(len(x), n, tile)),
        lambda f, data, count, n, tile: routines.loaded(f.layout, data, count, f.bits),
        "Huffman codes of {} numbers"),
    **dict.fromkeys(POSITIONS, PayloadType(
        lambda f, at, n, tile: routines.stored(
            f.layout, at, n, f.layout.most_bytes(len(at), n, tile)),
        lambda f, data, count, n, tile: routines.loaded(f.layout, data, count, n), "{} positions")),
}  # fmt: skip


def stored(field: Field, value: Any, tile: int, n: int) -> U8:
    """The bytes of a field with this value, for a tensor of n elements."""
    values = np.atleast_1d(np.asarray(value)).reshape(-1)
    return TYPES[field.storage].write(field, values, n, tile)


def read_header(
    module: Module, params: Mapping[str, Number], payload: U8, n: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of each selection of a payload, and bytes of each field of varying length. Raises
    PayloadError."""
    most, (counted, varying) = limits(module, n, params), header(module)
    head = payload[: 4 * len(counted + varying)]
    if len(head) < 4 * len(counted + varying):
        raise PayloadError(f"{module.name}: {len(head)} bytes are no payload")
    numbers = np.ascontiguousarray(head).view("<u4").tolist()
    counts = dict(zip(counted, numbers, strict=False))
    for name, count in counts.items():
        if count > most[name]:
            raise PayloadError(
                f"{module.name}: {count} selected elements, where at most {most[name]} are possible"
            )
    for family in families(module):
        if (together := sum(counts[name] for name in family)) > n:
            raise PayloadError(f"{module.name}: {together} elements of one form or another, of {n}")
    lengths = dict(zip(varying, numbers[len(counted) :], strict=True))
    for f in module.fields:
        longest = f.layout.most_bytes(n, n, tile_of(module)) if f.layout.recoded else math.inf
        if lengths.get(f.name, 0) > longest:
            raise PayloadError(
                f"{module.name}: {f.name!r} has {lengths[f.name]} bytes, where at most {longest} "
                "are possible"
            )
    return most | counts, lengths


def check_indices(
    module: Module, fields: Mapping[str, Any], n: int, kept: Mapping[str, int]
) -> None:
    """Raise PayloadError for positions that do not ascend within the tensor: those of a scatter,
    and those of varying length.

    kept: how many elements each selection has.
    """
    places = {e.args[0].value for e in walk(module.decode) if e.op == "scatter"}
    for f in module.fields:
        if f.name in places or f.storage in POSITIONS:
            size = kept.get(module.among(f.of), n)
            if not (np.diff(fields[f.name], prepend=-1, append=size) > 0).all():
                raise PayloadError(
                    f"{module.name}: an index lies outside the tensor of {size} elements, or is "
                    "not above the one before it"
                )


def loaded(field: Field, data: U8, n: int, tile: int, kept: int) -> Any:
    """The value of a field, from the start of `data`; kept: elements of its selection."""
    count, type_ = items(field, n, tile, kept), TYPES[field.storage]
    values = type_.read(field, data, count, n, tile)
    if values is None:
        raise PayloadError(f"{field.name!r} does not hold {type_.values.format(count)}")
    values = values.astype(np.int32) if field.packed else values
    if field.shape == "matrix":
        return values.reshape(extents(field.dims, n))
    return values[0] if field.shape == "scalar" else values
