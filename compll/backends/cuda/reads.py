"""What elements are read from: gradients, states, payloads, draws, and arrays at other places."""

from __future__ import annotations

from dataclasses import dataclass

from compll.backends.cuda.domains import Domain, Memory
from compll.backends.cuda.elements import ALONE, Elements, Place
from compll.backends.cuda.halves import Kept
from compll.backends.cuda.text import C_TYPE, literal
from compll.ir.expr import Expr
from compll.ir.module import WHOLE, Field
from compll.ir.program import Unsupported


@dataclass(frozen=True)
class Bytes:
    """Where a payload's fields are. begin: of the piece's bytes, as text or scratch memory. whole:
    whether that is a payload, or one field alone. mean: whether it holds a sum over `workers`."""

    begin: str | Memory
    whole: bool = True
    mean: bool = False


#: shapes of fields that hold codes
CODED = ("n", "kept", "matrix")


class Reads(Elements):
    """Elements of what is given. fed: whether states are at hand; fields and sums: where operators
    `field` and `combined` are read."""

    fed = False
    fields: dict[str, Bytes]
    sums: dict[str, Bytes]

    # what is given

    def at_input(self, e: Expr, place: Place) -> str:
        xs = self.hoist("xs", "XT* const xs = x + table[5 * p];")
        text = f"load1({xs}, {place.a}) * scale"
        if self.fed and self.module.feedback:
            held = f"{self.state('residual')}[{place.a}]"
            held = self.kept_states.read("residual", held)
            decay = self.module.decay
            return (
                f"{text} + {held}"
                if decay == 1
                else f"{text} + {held} * {literal(self.module.pool.const(decay), 'float')}"
            )
        return text

    def state(self, name: str) -> str:
        """The piece's part of a state with a value per element, or of a matrix."""
        return self.hoist(f"s_{name}", self.kept_states.view(name))

    @property
    def kept_states(self) -> Kept:
        """How states are read and written."""
        return Kept(self.module)

    def at_state(self, e: Expr, place: Place) -> str:
        if not self.fed:
            return "0.0f"
        name = str(e.value)
        if e.type.shape == "n":
            return self.kept_states.read(name, f"{self.state(name)}[{place.a}]")
        rows, cols = map(self.dim, e.type.dims)
        return f"{rows} * {cols} <= n ? {self.state(name)}[{self.linear(e, place)}] : 0.0f"

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
        if f.storage == "uint" and f.shape in CODED:
            count = self.count(Domain(f.shape, f.of, f.dims))
            return f"(i32)code_in<{f.bits}>({begin}, {count}, {item})"
        self.check_storage(f)
        cast = "(i32)" if f.storage in WHOLE else ""
        return f"{cast}load_{f.storage}({begin} + {f.item_bits // 8} * ({item}))"

    def check_storage(self, f: Field) -> None:
        """Raise Unsupported for fields that these kernels cannot access."""
        codes = f.storage == "uint" and (f.shape in CODED or f.bits == 8)
        known = f.storage in ("float32", "float16", "bfloat16", *WHOLE)
        if f.shape not in ("n", "kept", "matrix", "scalar") or not (codes or known):
            raise Unsupported(f"{f.storage} in {ALONE}", f.name)

    # draws

    def key(self, draw: int, high: str, *, seeded: bool) -> str:
        """The keys of a stream for elements whose number has the upper half `high`."""
        name = f"keys_{'own' if seeded else 'all'}{abs(draw)}"
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

    def at_ones(self, e: Expr, place: Place) -> str:
        return "1.0f"

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
        t = self.value(at, Place("matrix", place.a, place.b))
        outside = f"({t} < 0 || {t} >= {self.dim(x.type.dims[1])})"
        inside = self.declare("i64", f"{outside} ? 0 : {t}")
        return f"{outside} ? 0.0f : {self.value(x, Place('matrix', place.a, inside))}"

    def at_lookup(self, e: Expr, place: Place) -> str:
        row, index = e.args
        if row.type.shape != "matrix":
            raise Unsupported(f"tables in {ALONE}", "", e)
        inside = f"inside({self.value(index, place)}, {self.dim(row.type.dims[1])})"
        return self.value(row, Place("matrix", "0", self.declare("i64", inside)))

    def at_matmul(self, e: Expr, place: Place) -> str:
        """A short product, in the order of [Note: order of matrix products]."""
        a, b = e.args
        total, j = self.name("t"), self.name("j")
        self.body.add(f"float {total} = 0.0f;")
        with self.inner(f"for (i64 {j} = 0; {j} < {self.dim(a.type.dims[1])}; ++{j})"):
            left = self.value(a, Place("matrix", place.a, j))
            right = self.value(b, Place("matrix", j, place.b))
            self.body.add(f"{total} += {left} * {right};")
        return total
