"""Tiles of zeros: what a walk makes of them is known beforehand, so it is not computed.

[Note: tiles of zeros] The gradient of an embedding is zero but for the rows of the batch's words.
Most walks begin with a fold of magnitudes, and where it comes to 0, every lane was 0.0 or -0.0. If
that alone tells all that a walk's later loops store, they are printed for such tiles with constants.
It costs a branch per tile, and more where loops go in parts of vectors, which are left as they are.
To look at what was loaded, instead of at a fold, would take as long as it saves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from compll.backends.cpu.elements import ELEMENTS, codes
from compll.backends.cpu.lanes import WIDTH
from compll.ir.tile import Value, Walk
from compll.passes.fuse import Loop

TYPES: dict[str, Any] = {"f32": np.float32, "i32": np.int32, "bool": np.bool_}
ZERO = np.float32(0).tobytes()
#: by what a zero stays as it is: finite numbers that are not negative, or are above zero
FACTORS = {"mul": ("draw", "count"), "div": ("count",)}
#: what instructions make of a NaN and of whatever else
OF_NAN = dict.fromkeys(("add", "sub", "mul", "div"), np.nan)
OF_NAN |= dict.fromkeys(("lt", "le", "gt", "ge", "eq"), False)


def zero_tiles(walk: Walk, loops: list[Loop]) -> tuple[Value, dict[int, Any]] | None:
    """A fold that is 0 at tiles of zeros, and the numbers, by their values' ids, that are then
    known, all that loops behind those that fold store unasked among them. None: there is no such.
    """
    rest = loops[folding(loops) :]
    stores = [s for one in rest for s in one.stores if not s.back]
    if walk.of or walk.compacts or not stores or any(one.stride < WIDTH for one in rest):
        return None
    for fold in [v for v in walk.values if v.op == "fold" and v.attr in ("max", "sum")]:
        (lanes,) = fold.args
        if lanes.op == "abs" and lanes.kind == "f32":
            known = numbers_of_zeros(walk, lanes.args[0])
            if all(id(s.value) in known for s in stores):
                return fold, known
    return None


def folding(loops: list[Loop]) -> int:
    """How many loops there are up to the last one that folds."""
    return max((i for i, one in enumerate(loops, 1) if one.folds), default=0)


def numbers_of_zeros(walk: Walk, zero: Value) -> dict[int, Any]:
    """What values are, by id, where `zero` is 0.0 or -0.0, if it is the same for both; no NaN."""
    plus, minus = (numbers_where(walk, zero, np.float32(x)) for x in (0.0, -0.0))
    same = [key for key in plus.keys() & minus if plus[key].tobytes() == minus[key].tobytes()]
    return {key: plus[key] for key in same if not is_nan(plus[key])}


def numbers_where(walk: Walk, value: Value, number: Any) -> dict[int, Any]:
    """What is known of values where one of them is a number; by id."""
    known = {id(value): number}
    with np.errstate(all="ignore"):
        for v in walk.values:
            found = None if v is value else number_of(v, [known.get(id(a)) for a in v.args])
            if found is not None:
                known[id(v)] = found
    return known


def number_of(v: Value, args: list[Any]) -> Any:
    """What an instruction makes of what is known of its arguments; None: unknown."""
    kind = TYPES.get(v.kind)
    if kind is None:
        return None
    if v.op == "const":
        return kind(v.attr)
    if v.op in OF_NAN and any(map(is_nan, args)):
        return kind(OF_NAN[v.op])
    if not args or any(x is None for x in args):
        return unchanged(v, args)
    if v.op == "fold":
        return args[0] if v.attr != "count" and args[0].tobytes() == ZERO else None
    if v.op == "convert":
        return kind(args[0]) if np.isfinite(args[0]) else None
    if v.op == "code":
        return kind(codes(args[0], (1 << v.attr) - 1))
    if v.op not in ELEMENTS:
        return None
    return kind(np.ravel(ELEMENTS[v.op](*map(np.atleast_1d, args)))[0])


def unchanged(v: Value, args: list[Any]) -> Any:
    """The zero that a product, or a quotient, of a zero and one of FACTORS is; None: it is neither."""
    others = {"mul": v.args[::-1], "div": v.args[1:]}.get(v.op, ())
    pairs = zip(args, others, strict=False)
    return next((x for x, by in pairs if x == 0 and by.op in FACTORS[v.op]), None)


def is_nan(x: Any) -> bool:
    """Whether it is known to be NaN."""
    return x is not None and bool(x != x)
