"""Codes of 3, 5, 6 or 7 bits: they travel as fields of 8, 4, 2 and 1 bits.

`q: uint3[n]` is `q_0: uint2[n]` of `q & 3` and `q_2: uint1[n]` of `q >> 2`. Encode and decode see
`q`, so backends do not know of planes. Codes of 0 bits do not travel at all, and are 0 in decode.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from compll.frontend.rule_elements import Rules
from compll.ir.expr import Expr
from compll.ir.module import Field

#: a field, and the bits that its codes are shifted by
Plane = tuple[Field, int]


def parted(
    rules: Rules, fields: Iterable[Field], taken: Container[str], added: Container[str]
) -> dict[str, list[Plane]]:
    """The planes of every field, lowest first; the field itself if it needs no others.

    taken: names that planes cannot have; added: fields that ranks add as they are.
    """
    return {
        f.name: list(_planes(rules, f, taken)) if f.name not in added else [(f, 0)] for f in fields
    }


def _planes(rules: Rules, field: Field, taken: Container[str]) -> Iterator[Plane]:
    widths = [bits for bits in (8, 4, 2, 1) if field.bits & bits]
    if field.storage != "uint" or len(widths) == 1 or field.expr is None:
        yield field, 0
        return
    code, shift = rules.whole_number(field.expr, 0, (1 << field.bits) - 1), 0
    for bits in widths:
        name = f"{field.name}_{shift}"
        while name in taken:
            name += "_"
        part = rules.integer("bitand", (code, rules.pool.const((1 << bits) - 1)))
        yield replace(field, name=name, bits=bits, expr=part), shift
        code, shift = rules.integer("shr", (code, rules.pool.const(bits))), shift + bits


def joined(rules: Rules, codes: Sequence[tuple[Expr, int]]) -> Expr:
    """The codes, put together from their planes, of which the lowest is not shifted."""
    (whole, _), *others = codes or [(rules.pool.const(0), 0)]
    for code, shift in others:
        moved = rules.integer("shl", (code, rules.pool.const(shift)))
        whole = rules.integer("bitor", (whole, moved))
    return whole
