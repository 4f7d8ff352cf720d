"""Between which numbers whole-number elements lie, from their operators alone."""

from __future__ import annotations

from collections.abc import Callable

from compll.ir.expr import Expr, walk

Range = tuple[int, int]
ALL = (-(1 << 31), (1 << 31) - 1)


def _and(a: Range, b: Range) -> Range:
    """Bits of both: below any of them that is not negative."""
    tops = [high for low, high in (a, b) if low >= 0]
    return (0, min(tops)) if tops else ALL


def _either(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _shr(a: Range, b: Range) -> Range:
    if b[0] < 0 or b[1] > 31:
        return ALL
    ends = [end >> by for end in a for by in b]
    return min(ends), max(ends)


MEANING: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "where": lambda _, a, b: _either(a, b),
    "mod": lambda _, b: (0, b[1] - 1) if b[0] > 0 else ALL,
    "bitand": _and, "shr": _shr, "lift": lambda a: a,
}  # fmt: skip


def bounds(root: Expr) -> Range:
    """The least and the largest value that an integer expression may have; sums wrap around."""
    known: dict[int, Range] = {}
    for e in walk(root):
        known[id(e)] = found = _of(e, [known[id(a)] for a in e.args])
        if found[0] < ALL[0] or found[1] > ALL[1]:
            known[id(e)] = ALL
    return known[id(root)]


def _of(e: Expr, args: list[Range]) -> Range:
    if e.type.dtype == "bool":
        return (0, 1)
    if e.op == "const" and e.type.dtype == "int":
        return (int(e.value), int(e.value))
    if e.op == "exponent":
        return (-127, 128)
    if e.op == "int" and e.args[0].type.dtype in ("int", "bool"):
        return args[0]
    if e.type.dtype == "int" and e.op in MEANING:
        return MEANING[e.op](*args)
    return ALL
