"""The typed expression tree that every later stage works on.

Nodes are interned by a Pool, so equal expressions are the same object and a binding that is used
twice is computed once. Levels order how often a value changes: `static` (known from n, step and
the parameters, evaluated on the host), `scalar` (one per tensor, float64), `group` (one per group
of a grouped spec, float32), `n` (one per element, float32 or int32), and beside them `kept` (one
per selected element), `sample`, `table` (`of` says how many numbers) and `matrix` (`dims`: rows and
columns, as functions of n alone).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from compll.errors import Span
from compll.formulas import formula

#: storages of positions, of varying length
POSITIONS = ("gaps", "golomb", "elias")
PACKED = ("uint", "trit", "runs")
#: storages of integers that are not packed
WHOLE = ("int32", "uint32", "uint16")
#: how a state of 16 bits is kept: NumPy has no bfloat16, so its bits as whole numbers
HALVES = {"float16": "float16", "bfloat16": "uint16"}
LEVELS = {
    "static": 0,
    "scalar": 1,
    "group": 1,
    "n": 2,
    "kept": 2,
    "sample": 2,
    "table": 1,
    "matrix": 1,
}


@dataclass(frozen=True)
class Type:
    """dtype: float, int, bool, str or selection. shape: a level. of: the selection of a `kept`.

    dims: of a matrix, the static expressions of its rows and columns, which depend on n alone.
    """

    dtype: str
    shape: str
    of: str = ""
    dims: tuple[Expr, ...] = ()

    def __str__(self) -> str:
        shape = {"n": "[n]", "kept": f"[{self.of}]", "sample": "[sample]", "group": "[groups]"}
        if self.shape == "table":
            return f"{self.dtype}[{self.of}]"
        if self.shape == "matrix":
            return f"{self.dtype}[{', '.join(map(str, self.dims))}]"
        return self.dtype + shape.get(
            self.shape, "" if self.shape == "scalar" else f" ({self.shape})"
        )


@dataclass(frozen=True, eq=False)
class Expr:
    """An operator applied to expressions; `value` holds a constant, a name or a draw's number."""

    op: str
    args: tuple[Expr, ...]
    type: Type
    value: Any = None

    def __str__(self) -> str:
        return formula(self)


@dataclass
class Pool:
    """Makes expressions; equal ones are identical."""

    table: dict[Any, Expr] = field(default_factory=dict)

    def make(self, op: str, args: tuple[Expr, ...], type: Type, value: Any = None) -> Expr:
        """The one node with these parts."""
        # True == 1 == 1.0 in Python, so the constant's class is part of the key.
        key = (op, tuple(map(id, args)), type, value.__class__, value)
        node = self.table.get(key)
        if node is None:
            node = self.table[key] = Expr(op, args, type, value)
        return node

    def const(self, value: float | int | bool | str) -> Expr:
        """A literal."""
        dtype = {bool: "bool", int: "int", str: "str"}.get(value.__class__, "float")
        return self.make("const", (), Type(dtype, "static"), value)


def walk(*roots: Expr, into: Callable[[Expr], bool] = lambda e: True) -> Iterator[Expr]:
    """Every node below `roots` once, arguments first; without those below what is not `into`."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            if into(node):
                stack.extend((a, False) for a in reversed(node.args))


def leaves(*roots: Expr) -> tuple[str, ...]:
    """The arrays, as long as the tensor, that expressions are made of: "g" and names of states."""
    found = (e for e in walk(*roots) if e.op in ("input", "state") and e.type.shape == "n")
    return tuple(dict.fromkeys(str(e.value) for e in found))


def rebuild(pool: Pool, root: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """`root` with every node for which `change` returns something replaced by that."""
    done: dict[int, Expr] = {}
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            args = tuple(done[id(a)] for a in node.args)
            same = all(a is b for a, b in zip(args, node.args, strict=True))
            done[id(node)] = node if same else pool.make(node.op, args, node.type, node.value)
        elif id(node) not in done:
            new = change(node)
            if new is not None:
                done[id(node)] = new
            else:
                stack.append((node, True))
                stack.extend((a, False) for a in reversed(node.args))
    return done[id(root)]


@dataclass(frozen=True)
class Field:
    """A payload field or state. bits: of a uint, or of a trit while it is a code.

    storage: float32 float16 bfloat16 int32 uint32 uint16 uint trit runs gaps golomb elias.
    shape is a level; for `kept`, `of` names the selection; for `matrix`, `dims` are its rows and
    columns. `expr` is what encode stores in it.
    """

    name: str
    storage: str
    bits: int
    shape: str
    of: str = ""
    expr: Expr | None = None
    dims: tuple[Expr, ...] = ()
    #: the largest code, of codes in bytes that hold the sum of several; 0: what the bits hold
    most: int = 0

    @property
    def item_bits(self) -> int:
        """Bits of one value in the payload; of a trit, while it is a code."""
        if self.packed:
            return self.bits
        return {"float16": 16, "bfloat16": 16, "uint16": 16}.get(self.storage, 32)

    @property
    def dtype(self) -> str:
        """NumPy's type of the array that a state is kept in."""
        return HALVES.get(self.storage, "float32")

    @property
    def packed(self) -> bool:
        """Whether values are packed in bytes (see [Note: packing] in layout.py)."""
        return self.storage in PACKED

    @property
    def trits(self) -> bool:
        """Whether it holds values of 0, 1 and 2, five in a byte (see [Note: trits] in trits.py)."""
        return self.storage in ("trit", "runs")

    def packed_bytes(self, count: int) -> int:
        """Bytes of one tile of `count` packed values."""
        return -(-count // 5) if self.trits else (count * self.bits + 7) // 8


@dataclass(frozen=True)
class Selection:
    """A set of elements. kind `top`: the largest keys; kind `filter`: the first true ones.

    Of kind `drawn` there are `limit`, drawn at random without data, equal on all ranks.
    """

    name: str
    kind: str
    key: Expr
    limit: Expr
    threshold: Expr | None = None

    @property
    def dynamic(self) -> bool:
        """Whether the number of kept elements is known only at run time."""
        return self.kind == "filter"

    @property
    def unlimited(self) -> bool:
        """Whether it has all elements for which its condition holds, however many."""
        limit = self.limit.args[0] if self.limit.op == "float" else self.limit
        return self.dynamic and limit.op == "param" and limit.value == "n"


@dataclass(frozen=True)
class Module:
    """A type-checked spec: what every backend compiles."""

    name: str
    group: int
    fields: tuple[Field, ...]
    states: tuple[Field, ...]
    selections: tuple[Selection, ...]
    decode: Expr
    updates: dict[str, Expr]
    feedback: bool
    status: bool
    bindings: dict[str, Expr]
    pool: Pool
    #: decode(encode(g)) as an expression of the input; None where it is no elementwise function
    decoded: Expr | None = None
    merge: str = "decode"
    #: computed an array at a time (matrices, rounds), not in fused passes
    arrays: bool = False
    #: whether feedback is of what this rank's own payload decodes to, not what all ranks' do
    own: bool = False
    #: payload fields that all ranks combine, one after the other, and how
    rounds: tuple[tuple[str, str], ...] = ()
    #: of n: where compressing is worth while; None: everywhere
    when: Expr | None = None
    optimizers: str = "unknown"
    #: whether the mean of decode(encode(g)) over the seeds is g, by the spec's own claim
    unbiased: bool = False
    #: parameters beside the spec's own that choose how states are kept (see derived.py)
    kept_as: Mapping[str, str] = field(default_factory=dict)
    about: str = ""
    source: str = ""
    #: the spec's file, and the places of its names, as "section.name"
    path: str = ""
    spans: Mapping[str, Span] = field(default_factory=dict)
