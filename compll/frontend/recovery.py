"""[Note: recovery] How checking goes on after a mistake, so that one does not hide another.

Where a name or a call is wrong a stand-in takes its place: an expression WRONG of the type that it
would probably have. What is refused of a stand-in follows from the first mistake and is not told;
mistakes beside it are. A payload field that is wrong is one for decode all the same.
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
#: rules whose value has the level at which the arguments meet
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
TOTALS = ("reduce", "reduction", "extreme", "count")
#: levels, from the one that gives way to the one that stays
ORDER = ("static", "scalar", "group", "n", "kept")


def wrong(value: Expr) -> bool:
    """Whether the type of a value is a guess: a stand-in's, or that of what is made of one."""
    found: dict[int, bool] = {}
    for e in walk(value):
        found[id(e)] = e.op == WRONG or _open(e, [a for a in e.args if found[id(a)]])
    return found[id(value)]


def touched(*values: Expr) -> bool:
    """Whether a stand-in is anywhere in these values."""
    return any(e.op == WRONG for e in walk(*values))


def _open(e: Expr, guessed: Sequence[Expr]) -> bool:
    """Whether the level of a value depends on arguments of which it is a guess."""
    if not guessed or e.op == "gather" or e.op.startswith("reduce_"):
        return False
    sure = [a for a in e.args if a not in guessed and a.op != "lift"]
    return not any(a.type.shape == e.type.shape in ("n", "kept") for a in sure)


def element(pool: Pool) -> Expr:
    """A stand-in for a number per element."""
    return pool.make(WRONG, (), Type("float", "n"))


def meant(pool: Pool, value: Expr, whole: str) -> Expr:
    """A stand-in for a name: of what the nearest name stands for, but not known before data."""
    shape = whole if value.type.shape == "static" else value.type.shape
    return pool.make(WRONG, (), replace(value.type, shape=shape), value.value)


def stand_in(
    pool: Pool, op: str, args: Sequence[Expr], whole: str, *, complete: bool
) -> Expr | None:
    """What a call that is wrong would probably have given; None where that is open.

    args: those that could be read. whole: the level of one number. complete: whether none lacks.
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
    """The level, in decode, of a payload field that is wrong: its value's own, if that is right;
    else by the declared length, among them names of selections."""
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
