"""Codes of 3, 5, 6 or 7 bits: they travel as fields of 8, 4, 2 and 1 bits.

`q: uint3[n]` is `q_0: uint2[n]` of `q & 3` and `q_2: uint1[n]` of `q >> 2`. Encode and decode see
`q`, so backends do not know of planes. Codes of 0 bits do not travel at all, and are 0 in decode.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from compll.frontend.rule_context import Context
from compll.frontend.rule_elements import integer, whole_number
from compll.ir.expr import Expr
from compll.ir.module import Field

#: a field, and the bits that its codes are shifted by
Plane = tuple[Field, int]


def split(
    c: Context, fields: Iterable[Field], taken: Container[str], added: Container[str]
) -> dict[str, list[Plane]]:
    """The planes of every field, lowest first; the field itself if it needs no others.

    taken: names that planes cannot have; added: fields that ranks add as they are.
    """
    return {f.name: list(_planes(c, f, taken)) if f.name not in added else [(f, 0)] for f in fields}


def _planes(c: Context, field: Field, taken: Container[str]) -> Iterator[Plane]:
    widths = [bits for bits in (8, 4, 2, 1) if field.bits & bits]
    if field.storage != "uint" or len(widths) == 1 or field.expr is None:
        yield field, 0
        return
    code, shift = whole_number(c, field.expr, 0, (1 << field.bits) - 1), 0
    for bits in widths:
        name = f"{field.name}_{shift}"
        while name in taken:
            name += "_"
        part = integer(c, "bitand", code, c.pool.const((1 << bits) - 1))
        yield replace(field, name=name, bits=bits, expr=part), shift
        code, shift = integer(c, "shr", code, c.pool.const(bits)), shift + bits


def joined(c: Context, codes: Sequence[tuple[Expr, int]]) -> Expr:
    """The codes, put together from their planes, of which the lowest is not shifted."""
    (whole, _), *others = codes or [(c.pool.const(0), 0)]
    for code, shift in others:
        moved = integer(c, "shl", code, c.pool.const(shift))
        whole = integer(c, "bitor", whole, moved)
    return whole
