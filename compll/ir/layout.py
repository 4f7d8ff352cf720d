"""The bytes of a payload, known up to the selections' sizes before any data.

[Note: packing] A packed array travels in tiles of TILE elements (in a grouped spec: one group).
A tile of m elements of b bits takes w = ceil(m * b / 8) bytes; element i sits in byte i mod w at
bit b * (i div w). So neighbouring bytes come from neighbouring elements, and packing is a few
full-width vector operations on a CPU and coalesced on a GPU.

A payload is: a uint32 count per filter selection, a uint32 length in bytes per field of varying
length, then the fields in the order of `payload:` (those of varying length last), then the status
byte where feedback.py finds that one is needed. Numbers are little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from compll.ir.expr import Expr, Type, walk
from compll.ir.module import POSITIONS, Field, Module, Selection
from compll.ir.static import Number, as_count, evaluate, extents
from compll.numerics.numbers import I64

__all__ = ["MOST", "cut", "cuts", "most_in", "truncated"]

# ---- exclusive ----------------------------------------------------------------------------------
# Selections that share no element: their sizes together are at most n.
# A payload that stores one of several forms for every element (a tag tells which) therefore has
# the bound of the largest form, not of all of them.


def families(module: Module) -> list[list[str]]:
    """Names of selections, grouped into families whose members share no element.

    Selections with fields of positions are left out: their bytes vary from element to element.
    """
    coded = {f.of for f in module.fields if f.storage in POSITIONS}
    all_families: list[list[Selection]] = []
    for s in module.selections:
        home = next((f for f in all_families if all(disjoint(s.key, o.key) for o in f)), None)
        if not s.unlimited or s.name in coded:
            continue
        if home is None:
            all_families.append([s])
        else:
            home.append(s)
    return [[s.name for s in family] for family in all_families if len(family) > 1]


def disjoint(a: Expr, b: Expr) -> bool:
    """True if two conditions cannot both hold: a value equals two numbers, or one condition negates
    the other."""
    if any(x.op == "not" and x.args[0] is y for x, y in ((a, b), (b, a))):
        return True
    if not (a.op == b.op == "eq" and a.args[0] is b.args[0]):
        return False
    first, two = _number(a.args[1]), _number(b.args[1])
    return first is not None and two is not None and first != two


def _number(expr: Expr) -> Number | None:
    """A constant as elements are compared with it; None if it is none."""
    if any(e.op not in ("const", "lift", "float", "int") for e in walk(expr)):
        return None
    value = evaluate(expr, {})
    narrow = expr.type.dtype == "float" and expr.type.shape not in ("static", "scalar")
    return float(np.float32(value)) if narrow else value


def longest(
    module: Module, most: Mapping[str, int], total: Callable[[Mapping[str, int]], int]
) -> int:
    """The largest total of payload bytes if selections have at most these sizes, except for
    rounding to bytes: in each family one selection has all elements. A family's share of the total
    does not depend on the others, so each has its own largest."""
    exclusive = families(module)
    none = {**most, **{name: 0 for family in exclusive for name in family}}
    least = total(none)
    shares = (max(total({**none, name: most[name]}) for name in f) - least for f in exclusive)
    return least + sum(shares)


def roundings(module: Module) -> int:
    """Bytes by which a payload may exceed `longest`: one for each packed field."""
    names = {name for family in families(module) for name in family}
    return sum(f.of in names and f.item_bits < 8 for f in module.fields)


# ---- layout -------------------------------------------------------------------------------------

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
    given = lengths or {}
    head = 4 * sum(map(len, header(module)))
    result = starts(module, head, lambda f: given.get(f.name, field_bytes(f, module, n, kept)))
    return result if n else [0]


def starts(module: Module, head: int, bytes_of: Callable[[Field], Any]) -> list[Any]:
    """Starts of the payload's parts behind a header of `head` bytes, and its end. bytes_of: those
    of a part, as an int or as a Number of a program (see numerics/traced.py)."""
    return list(accumulate(map(bytes_of, module.parts), initial=head))


def payload_bytes(module: Module, n: int, params: Mapping[str, Number]) -> int:
    """The most bytes that a payload of n elements can take."""
    most = limits(module, n, params)
    most_bytes = longest(module, most, lambda kept: layout(module, n, kept)[-1])
    return most_bytes + (roundings(module) if n else 0)


def is_fixed(module: Module) -> bool:
    """True if the payload's length depends on n alone."""
    return not any(header(module))


# ---- capacity -----------------------------------------------------------------------------------
# Payloads that are cut: the number of elements that selections may keep in a given number of
# bytes.
# If both sides of a message must know its length beforehand, an encode is given a capacity.
# Elements that do not fit are treated as if the condition did not hold for them: a `filter`
# keeps the first elements, and states, such as the residual, treat the others as not sent. So
# nothing is lost.

#: the static that holds the most elements a filter of `truncated` keeps; no parameter has this name
MOST = "(most)"


def cuts(module: Module) -> bool:
    """True if payloads can be cut: a state keeps the elements that selections leave out, and decode
    takes any number of elements."""
    filters = [s for s in module.selections if s.dynamic]
    spreads = any(e.op == "spread" for e in walk(module.decode))
    return bool(filters and module.states) and module.decoded is not None and not spreads


def truncated(module: Module) -> Module:
    """The module with filters that keep at most MOST elements; the host sets MOST for every
    piece."""
    most = module.pool.make("param", (), Type("int", "static"), MOST)

    def less(s: Selection) -> Selection:
        limit = module.pool.make("min", (s.limit, most), s.limit.type)
        return replace(s, limit=limit) if s.dynamic else s

    return replace(module, selections=tuple(map(less, module.selections)))


def cut(module: Module, limits: I64, most: I64 | None) -> I64:
    """Lower the `limits` of filters, int64 [pieces, selections], to `most`, int64 [pieces]. Changes
    `limits` and returns it."""
    if most is not None:
        filters = [i for i, s in enumerate(module.selections) if s.dynamic]
        limits[:, filters] = np.minimum(limits[:, filters], most[:, None])
    return limits


def most_in(module: Module, params: Mapping[str, Number], n: int, capacity: int) -> int:
    """Elements of n that each filter may keep, so that a payload has at most `capacity` bytes; -1
    if not even an empty payload fits."""
    whole = limits(module, n, params)
    counted = {s.name for s in module.selections if s.dynamic}

    def fits(most: int) -> bool:
        kept = {name: min(k, most) if name in counted else k for name, k in whole.items()}
        return layout(module, n, kept)[-1] <= capacity

    low, high = -1, max((whole[name] for name in counted), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# ---- rounds -------------------------------------------------------------------------------------
# Methods that aggregate in the middle of a step: ranks combine payload fields, one after the
# other.

#: for each earlier round: the summed payloads (uint8), and the start of each piece (int64 [m])
Before: TypeAlias = Sequence[tuple[Any, Any]]


@dataclass(frozen=True, repr=False)
class Round:
    """A payload field that adds up without decoding, n numbers of `dtype`, and the way it is
    combined."""

    field: Field
    how: str
    module: Module

    def __repr__(self) -> str:
        return f"Round({self.name!r}, how={self.how!r}, dtype={self.dtype!r})"

    @property
    def name(self) -> str:
        """The payload field's name."""
        return self.field.name

    @property
    def dtype(self) -> str:
        """float32, float16, bfloat16 or uint8."""
        return "uint8" if self.field.storage == "uint" else self.field.storage

    @property
    def op(self) -> str:
        """The all-reduce: sum or max."""
        return "max" if self.how == "max" else "sum"

    @property
    def most_workers(self) -> int:
        """The most ranks whose sum of codes fits a byte; 0: any number."""
        return 255 // self.field.most if self.field.most else 0

    def payload_bytes(self, n: int) -> int:
        """Bytes of this round for n elements."""
        return field_bytes(self.field, self.module, n, {self.field.of: self.kept(n)}) if n else 0

    def kept(self, n: int) -> int:
        """Elements of the field's drawn selection; 0 for other fields."""
        by_name = {s.name: s for s in self.module.selections}
        return limit(by_name[self.field.of], {}, n) if self.field.of in by_name else 0


def draws(module: Module) -> bool:
    """True if decode repeats random draws of encode."""
    return any(e.op in ("indices", "in", "shared", "random_matrix") for e in walk(module.decode))


def rounds(module: Module) -> tuple[Round, ...]:
    """The rounds of a spec, in order."""
    by_name = {f.name: f for f in module.fields}
    return tuple(Round(by_name[name], how, module) for name, how in module.rounds)


def refused(rounds: Sequence[Round], workers: int) -> str | None:
    """The reason why `workers` ranks cannot add up payloads of a round; None if they can."""
    for round_ in rounds:
        if round_.most_workers and workers > round_.most_workers:
            sent = round_.field.most
            return (
                f"{workers} ranks add up codes of 0 to {sent} to {workers * sent}, "
                f"and a byte holds 255: at most {round_.most_workers} ranks, or fewer bits"
            )
    return None
