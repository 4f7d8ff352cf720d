"""Elements of arrays as CUDA C++: what a kernel computes of one place of an array."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from compll.backends.cuda.domains import Domain, Memory
from compll.backends.cuda.maker import Maker
from compll.backends.cuda.text import C_TYPE, element, literal, tensor
from compll.ir.expr import Expr, walk
from compll.ir.matrices import short
from compll.ir.program import Unsupported

ALONE = "a spec that is computed an array at a time"
#: operators whose results are arrays in scratch memory
WHOLE = (
    "hadamard", "scatter", "in", "orthonormal", "left_vectors", "right_vectors", "singular_values",
    "chosen", "sum_by", "row_max", "row_min",
    "top_columns", "place_columns",
)  # fmt: skip
#: operators that read elements at other places, or make them
PLACED = (
    "lift", "input", "state", "field", "combined", "uniform", "shared", "random_matrix", "ones", "gather",
    "indices", "matrix", "flat", "transpose", "take_columns", "matmul", "lookup",
)  # fmt: skip


class Place(NamedTuple):
    """Where an element stands, as names: n (element a), kept (a-th of selection b), matrix (row a,
    column b)."""

    kind: str
    a: str
    b: str = ""


def kept_in_memory(e: Expr) -> bool:
    """Whether a value is an array in scratch memory; a short product is computed where it is read."""
    return e.op in WHOLE or (e.op == "matmul" and not short(e))


def plain(e: Expr) -> bool:
    """Whether an element follows from the same element of the arguments."""
    arrays = e.type.shape in ("n", "kept", "matrix")
    return arrays and not (e.op in PLACED or e.op in WHOLE or not e.args)


class Elements(Maker):
    """Maker of values at places."""

    def open(self, own: str) -> None:
        super().open(own)
        self.named: dict[tuple[int, Place], str] = {}

    @contextmanager
    def inner(self, head: str) -> Iterator[None]:
        """A block of the body; what is named in it is not known after it."""
        before = dict(self.named)
        with self.body.block(head):
            yield
        self.named = before

    def place(self, domain: Domain, item: str) -> Place:
        """The place of an item."""
        if domain.kind != "matrix":
            return Place(domain.kind, item, domain.of)
        r, c, cols = self.name("r"), self.name("c"), self.dim(domain.dims[1])
        self.body.add(f"const i64 {r} = quotient({item}, {cols}), {c} = {item} - {r} * {cols};")
        return Place("matrix", r, c)

    def value(self, root: Expr, place: Place) -> str:
        """The name of an element."""

        def open_(e: Expr) -> bool:
            return plain(e) and (id(e), place) not in self.named and not self.known(e)

        for e in walk(root, into=open_):
            if (id(e), place) not in self.named:
                self.named[id(e), place] = self.made(e, place)
        return self.named[id(root), place]

    def made(self, e: Expr, place: Place) -> str:
        if e.type.shape in ("static", "scalar"):
            return self.lifted(e, e.type.dtype)
        if kept_in_memory(e) or self.known(e):
            return self.declare(C_TYPE[e.type.dtype], self.stored_at(e, place))
        if e.op in PLACED:
            text = str(getattr(self, f"at_{e.op}")(e, place))
            return text if e.op == "lift" else self.declare(C_TYPE[e.type.dtype], text)
        if not e.args or e.type.shape not in ("n", "kept", "matrix"):
            raise Unsupported(f"`{e.op}` in {ALONE}", "", e)
        return self.declare(C_TYPE[e.type.dtype], self.plain_text(e, place))

    def plain_text(self, e: Expr, place: Place) -> str:
        """An operator on the same element of its arguments.

        A number beside a matrix is float64, as in the reference, and so is what is made of it.
        """
        args = [self.named[id(a), place] for a in e.args]
        if not any(a.type.shape == "scalar" and a.type.dtype == "float" for a in e.args):
            return element(e, args)
        wide = [
            self.hoisted_number(a) if a.type.shape == "scalar" else t
            for a, t in zip(e.args, args, strict=True)
        ]
        text = tensor(e, [f"(double)({t})" for t in wide])
        return text if e.type.dtype == "bool" else f"({C_TYPE[e.type.dtype]})({text})"

    def hoisted_number(self, e: Expr) -> str:
        """A tensor-level value: a double."""
        name = f"n{self.slot(e)}"
        return self.hoist(name, f"const double {name} = {self.number(e)};")

    # numbers of the tensor

    def slot(self, e: Expr) -> int:
        raise NotImplementedError

    def number(self, e: Expr) -> str:
        """A static or tensor-level value, as text."""
        if e.type.shape == "static":
            return self.static(e)
        text = f"sc[p * @SLOTS@ + {self.slot(e)}]"
        return f"({text} != 0.0)" if e.type.dtype == "bool" else text

    def lifted(self, arg: Expr, dtype: str) -> str:
        """A number as an element."""
        known = literal(arg, dtype)
        if known:
            return known
        text, kind = self.number(arg), C_TYPE[dtype]
        known = text.replace(" ", "")
        name = "h" + "".join(ch if ch.isalnum() else "_" for ch in known) + kind
        cast = text if dtype == "bool" and text.endswith("!= 0.0)") else f"({kind})({text})"
        return self.hoist(name, f"const {kind} {name} = {cast};")

    def at_lift(self, e: Expr, place: Place) -> str:
        (arg,) = e.args
        if arg.type.shape not in ("static", "scalar"):
            raise Unsupported(f"values of groups in {ALONE}", "", e)
        return self.lifted(arg, e.type.dtype)

    def linear(self, e: Expr, place: Place) -> str:
        """The number of an element in its array; a row or column of one repeats."""
        if place.kind != "matrix":
            return place.a
        r, c = place.a, place.b
        one = [d.op == "const" and d.value == 1 for d in e.type.dims]
        if one[0]:
            return "0" if one[1] else c
        return r if one[1] else f"{r} * {self.dim(e.type.dims[1])} + {c}"

    def stored_at(self, e: Expr, place: Place) -> str:
        """An element of an array in scratch memory."""
        memory = self.array(e)
        return f"{self.held(memory)}[{self.linear(e, place)}]"

    def known(self, e: Expr) -> bool:
        """Whether an array is in scratch memory."""
        raise NotImplementedError

    def array(self, e: Expr) -> Memory:
        """The scratch memory of an array."""
        raise NotImplementedError
