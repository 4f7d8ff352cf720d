"""Elements of arrays as CUDA C++: what a kernel computes of one place of an array."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from compll.backends.cuda_domains import Domain, Memory
from compll.backends.cuda_maker import Maker
from compll.backends.cuda_text import C_TYPE, element, literal, tensor
from compll.ir import Expr, Field, walk
from compll.program import Unsupported

ALONE = "a spec that is computed an array at a time"
#: operators whose results are arrays in scratch memory
WHOLE = (
    "hadamard", "scatter", "in", "orthonormal", "left_vectors", "right_vectors", "singular_values",
    "chosen",
)  # fmt: skip
#: operators that read elements at other places, or make them
PLACED = (
    "lift", "input", "state", "field", "combined", "uniform", "shared", "random_matrix", "gather",
    "indices", "matrix", "flat", "transpose", "take_columns", "matmul",
)  # fmt: skip
#: the longest inner dimension of a product that is computed where it is read
SHORT = 8


class Place(NamedTuple):
    """Where an element stands, as names: n (element a), kept (a-th of selection b), matrix (row a,
    column b)."""

    kind: str
    a: str
    b: str = ""


@dataclass(frozen=True)
class Bytes:
    """Where a payload's fields are. begin: of the piece's bytes, as text or scratch memory. whole:
    whether that is a payload, or one field alone. mean: whether it holds a sum over `workers`."""

    begin: str | Memory
    whole: bool = True
    mean: bool = False


def short(e: Expr) -> bool:
    """Whether a product is computed where it is read."""
    inner = e.args[0].type.dims[1]
    return inner.op == "const" and int(inner.value) <= SHORT


def kept_in_memory(e: Expr) -> bool:
    """Whether a value is an array in scratch memory."""
    return e.op in WHOLE or (e.op == "matmul" and not short(e))


def plain(e: Expr) -> bool:
    """Whether an element follows from the same element of the arguments."""
    arrays = e.type.shape in ("n", "kept", "matrix")
    return arrays and not (e.op in PLACED or e.op in WHOLE or not e.args)


class Elements(Maker):
    """Maker of values at places. fed: whether states are at hand; where: where fields are read."""

    fed = False
    #: of operators `field` and `combined`, by field
    fields: dict[str, Bytes]
    sums: dict[str, Bytes]

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
        for e in walk(root, into=lambda e: plain(e) and (id(e), place) not in self.named):
            if (id(e), place) not in self.named:
                self.named[id(e), place] = self.made(e, place)
        return self.named[id(root), place]

    def made(self, e: Expr, place: Place) -> str:
        if e.type.shape in ("static", "scalar"):
            return self.lifted(e, e.type.dtype)
        if kept_in_memory(e):
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

    # what is given

    def at_input(self, e: Expr, place: Place) -> str:
        xs = self.hoist("xs", "XT* const xs = x + table[5 * p];")
        text = f"load1({xs}, {place.a}) * scale"
        if self.fed and self.module.feedback:
            return f"{text} + {self.state('residual')}[{place.a}]"
        return text

    def state(self, name: str) -> str:
        """The piece's part of a state with a value per element, or of a matrix."""
        return self.hoist(f"s_{name}", f"float* const s_{name} = a_{name} + table[5 * p + 4];")

    def at_state(self, e: Expr, place: Place) -> str:
        if not self.fed:
            return "0.0f"
        name = str(e.value)
        if e.type.shape == "n":
            return f"{self.state(name)}[{place.a}]"
        rows, cols = map(self.dim, e.type.dims)
        return f"{rows} * {cols} <= n ? {self.state(name)}[{self.linear(e, place)}] : 0.0f"

    def linear(self, e: Expr, place: Place) -> str:
        """The number of an element in its array; a row or column of one repeats."""
        if place.kind != "matrix":
            return place.a
        r, c = place.a, place.b
        one = [d.op == "const" and d.value == 1 for d in e.type.dims]
        if one[0]:
            return "0" if one[1] else c
        return r if one[1] else f"{r} * {self.dim(e.type.dims[1])} + {c}"

    def at_field(self, e: Expr, place: Place) -> str:
        return self.read(e, self.fields[str(e.value)], self.linear(e, place))

    def at_combined(self, e: Expr, place: Place) -> str:
        return self.read(e, self.sums[str(e.value)], self.linear(e, place))

    def field(self, name: str) -> Field:
        return next(f for f in self.module.fields if f.name == name)

    def bytes_of(self, f: Field, where: Bytes, kind: str = "const u8*") -> str:
        """The first byte of a field of the piece."""
        begin = where.begin if isinstance(where.begin, str) else self.held(where.begin)
        start = f" + {self.size('start', f.name)}" if where.whole else ""
        name = f"{'d' if kind.startswith('const') else 'o'}_{f.name}"
        return self.hoist(name, f"{kind} const {name} = {begin}{start};")

    def read(self, e: Expr, where: Bytes, item: str) -> str:
        """An item of a payload field, or the mean of what the ranks sum up."""
        f = self.field(str(e.value))
        text = self.item_text(f, self.bytes_of(f, where), item)
        if where.mean:
            text = f"(float)({text}) / workers"
        return f"({C_TYPE[e.type.dtype]})({text})"

    def item_text(self, f: Field, begin: str, item: str) -> str:
        """A stored value."""
        if f.storage == "uint" and f.bits == 8:
            return f"(i32){begin}[{item}]"
        if f.storage == "uint" and f.shape in ("n", "kept"):
            count = "n" if f.shape == "n" else self.count(Domain("kept", f.of))
            return f"(i32)code_in<{f.bits}>({begin}, {count}, {item})"
        self.check_storage(f)
        cast = "(i32)" if f.access.startswith("uint") else ""
        return f"{cast}load_{f.access}({begin} + {f.item_bits // 8} * ({item}))"

    def check_storage(self, f: Field) -> None:
        """Raise Unsupported for fields that these kernels cannot access."""
        codes = f.storage == "uint" and (f.shape == "n" or f.shape == "kept" or f.bits == 8)
        known = f.access in ("float32", "float16", "bfloat16", "uint32", "uint16")
        if f.shape not in ("n", "kept", "matrix", "scalar") or not (codes or known):
            raise Unsupported(f"{f.storage} in {ALONE}", f.name)

    # draws

    def key(self, draw: int, high: str, *, seeded: bool) -> str:
        """The keys of a stream for elements whose number has the upper half `high`."""
        name = f"{'k' if seeded else 'a'}{abs(draw)}"
        near = self.hoist(f"{name}_high", f"const i64 {name}_high = {self.offset()} >> 32;")
        stream = self.stream(draw, near, seeded=seeded)
        self.hoist(name, f"const u64 {name} = {stream};")
        far = self.stream(draw, high, seeded=seeded)
        return f"({high} == {near} ? {name} : far_{far})"

    def drawn(self, draw: int, place: Place, *, seeded: bool) -> str:
        """The draw of an element, under the number of its tile's first one."""
        i = place.a
        high = self.declare("i64", f"({self.offset()} + {i} / {self.tile} * {self.tile}) >> 32")
        return f"uniform((u32)({self.offset()} + {i}), {self.key(draw, high, seeded=seeded)})"

    def at_uniform(self, e: Expr, place: Place) -> str:
        return self.drawn(int(e.value), place, seeded=True)

    def at_shared(self, e: Expr, place: Place) -> str:
        return self.drawn(-16 - int(e.value), place, seeded=False)

    def at_random_matrix(self, e: Expr, place: Place) -> str:
        k = self.declare("i64", self.linear(e, place))
        self.hoist("rm", f"const u64 rm = {self.stream(-2, '0')};")
        keys = f"({k} >> 32 ? far_{self.stream(-2, f'{k} >> 32')} : rm)"
        return f"2.0f * uniform((u32){k}, {keys}) - 1.0f"

    # other places

    def at_gather(self, e: Expr, place: Place) -> str:
        return self.value(e.args[0], Place("n", self.position(str(e.value), place.a)))

    def at_indices(self, e: Expr, place: Place) -> str:
        return f"(i32){self.position(str(e.value), place.a)}"

    def position(self, name: str, item: str) -> str:
        """Where an item of a drawn selection stands."""
        memory = self.held(self.scratch[f"drawn_{name}"])
        count = self.count(Domain("kept", name))
        return self.declare("i64", f"drawn_at({memory}, n, {count}, {item})")

    def at_matrix(self, e: Expr, place: Place) -> str:
        self.rooms[("matrix", e.type.dims)] = None
        k = self.declare("i64", self.linear(e, place))
        inside = self.declare("i64", f"{k} < n ? {k} : 0")
        return f"{k} < n ? {self.value(e.args[0], Place('n', inside))} : 0.0f"

    def at_flat(self, e: Expr, place: Place) -> str:
        (arg,) = e.args
        self.rooms[("flat", arg.type.dims)] = None
        return self.value(arg, self.place(Domain("matrix", "", arg.type.dims), place.a))

    def at_transpose(self, e: Expr, place: Place) -> str:
        return self.value(e.args[0], Place("matrix", place.b, place.a))

    def at_take_columns(self, e: Expr, place: Place) -> str:
        x, at = e.args
        t = self.value(at, Place("matrix", "0", place.b))
        inside = self.declare("i64", f"{t} < 0 ? 0 : {t}")
        return f"{t} < 0 ? 0.0f : {self.value(x, Place('matrix', place.a, inside))}"

    def at_matmul(self, e: Expr, place: Place) -> str:
        """A short product, in the order of [Note: order of matrix products]."""
        a, b = e.args
        total, j = self.name("t"), self.name("j")
        self.body.add(f"double {total} = 0.0;")
        with self.inner(f"for (i64 {j} = 0; {j} < {self.dim(a.type.dims[1])}; ++{j})"):
            left = self.value(a, Place("matrix", place.a, j))
            right = self.value(b, Place("matrix", j, place.b))
            self.body.add(f"{total} += (double){left} * (double){right};")
        return f"(float){total}"

    def stored_at(self, e: Expr, place: Place) -> str:
        """An element of an array in scratch memory."""
        memory = self.array(e)
        return f"{self.held(memory)}[{self.linear(e, place)}]"

    def array(self, e: Expr) -> Memory:
        """The scratch memory of an array."""
        raise NotImplementedError
