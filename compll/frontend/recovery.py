"""[Note: recovery] Checking goes on after a mistake, so that one does not hide another.

A stand-in replaces a wrong name or call: an expression WRONG of the type that it would probably
have. Errors about a stand-in follow from the first mistake and are not reported; other mistakes
are. Decode sees a wrong payload field as a field all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compll.frontend.operators import OPERATORS
from compll.frontend.spec import Declared
from compll.frontend.syntax import Name
from compll.ir.expr import Expr, Pool, Type, walk

WRONG = "wrong"
TRUTHS = ("compare", "logic", "test")
#: rules whose value has the highest level of the arguments
NUMBERS = (
    "arithmetic",
    "real",
    "power",
    "rounding",
    "clip",
    "cast",
    "where",
    "integer",
    "truncated",
)
#: rules whose value is one number
TOTALS = ("reduction", "extreme", "count")
#: levels; of two the later one wins
ORDER = ("static", "scalar", "group", "n", "kept")


def wrong(value: Expr) -> bool:
    """True if a value's type is a guess: the value is a stand-in, or takes its type from one."""
    found: dict[int, bool] = {}
    for e in walk(value):
        found[id(e)] = e.op == WRONG or _open(e, [a for a in e.args if found[id(a)]])
    return found[id(value)]


def touched(*values: Expr) -> bool:
    """True if one of these values contains a stand-in."""
    return any(e.op == WRONG for e in walk(*values))


def _open(e: Expr, guessed: Sequence[Expr]) -> bool:
    """True if the level of a value depends on arguments with a guessed type."""
    if not guessed or e.op == "gather" or e.op.startswith("reduce_"):
        return False
    sure = [a for a in e.args if a not in guessed and a.op != "lift"]
    return not any(a.type.shape == e.type.shape in ("n", "kept") for a in sure)


def element(pool: Pool) -> Expr:
    """A stand-in for a number per element."""
    return pool.make(WRONG, (), Type("float", "n"))


def meant(pool: Pool, value: Expr, whole: str) -> Expr:
    """A stand-in for a misspelled name: it has the nearest name's type, but depends on data."""
    shape = whole if value.type.shape == "static" else value.type.shape
    return pool.make(WRONG, (), replace(value.type, shape=shape), value.value)


def stand_in(
    pool: Pool, op: str, args: Sequence[Expr], whole: str, *, complete: bool
) -> Expr | None:
    """The probable value of a wrong call; None if it cannot be guessed.

    args: the arguments that could be read. whole: the level of one number. complete: no argument is
    missing.
    """
    rule = OPERATORS[op].rule if op in OPERATORS else ""
    if rule in TOTALS and (rule != "extreme" or len(args) == 1):
        return pool.make(WRONG, (), Type("float", whole))
    known = args and all(a.type.shape in ORDER for a in args)
    if rule not in (*TRUTHS, *NUMBERS) or not known:
        return None
    top = max(args, key=lambda a: ORDER.index(a.type.shape)).type
    if not complete and top.shape not in ("n", "kept"):
        return None
    shape = whole if top.shape == "static" else top.shape
    return pool.make(WRONG, (), Type("bool" if rule in TRUTHS else "float", shape, top.of))


def shape(item: Declared, value: Expr | None, whole: str, lengths: Sequence[str]) -> Type | None:
    """The level of a wrong payload field in decode: that of its value, if the value is right; else
    of its declared length, which may name a selection."""
    own = value.type if value is not None else None
    if own is not None and (own.shape not in ORDER[1:] or own.dtype in ("selection", "str")):
        return None
    if value is not None and not wrong(value):
        return own
    name = item.dim.name if isinstance(item.dim, Name) and item.second is None else ""
    known = {each: Type("float", "kept", each) for each in lengths}
    known |= {"n": Type("float", "n"), "groups": Type("float", "group")}
    bare = item.dim is None and item.second is None
    return known.get(name) or own or (Type("float", whole) if bare else None)
