"""What encode and decode kernels share: values of every level as text, under the names that they
already have."""

from __future__ import annotations

from compll.backends.cpu.text import Lines, code, element, tensor
from compll.ir.expr import Expr, walk
from compll.ir.layout import tile_of
from compll.ir.module import Field, Module
from compll.ir.program import LIBRARY, Program
from compll.passes.repeats import repeated

#: how a loop over elements begins
LOOPS = ("for i in ", "for j in ")
#: a line in whose place static values get their names
STATICS = "# statics"
PLANES = {1: 8, 2: 4, 4: 2, 8: 1}


class Values(Lines):
    """Emits expressions; knows which values already have a name or a buffer."""

    def __init__(self, module: Module, program: Program | None) -> None:
        super().__init__()
        self.module, self.program = module, program
        self.tile = tile_of(module)
        self.statics: list[Expr] = []
        self.names: dict[int, str] = {}
        self.local: dict[int, str] = {}
        self.buffers: dict[int, str] = {}
        self.buckets: dict[int, str] = {}  # arrays of the whole tensor, which walks over tiles read
        self.codes: dict[str, str] = {}
        self.turn: dict[int, str] = {}
        self.where = "tile"
        self.fresh = 0

    def name(self, prefix: str) -> str:
        """A new local name."""
        self.fresh += 1
        return f"{prefix}{self.fresh}"

    # static and tensor-level values

    def static(self, expr: Expr) -> str:
        """A host-computed value: a name for an element of the piece's row of statics."""
        known = next((i for i, e in enumerate(self.statics) if e is expr), None)
        if known is None:
            known = len(self.statics)
            self.statics.append(expr)
        return f"st{known}"

    def statics_here(self) -> None:
        """Where the names of static values are to be assigned: before all that reads them."""
        self.add(STATICS)

    def __str__(self) -> str:
        """The text, once all is emitted."""
        named = [f"st{number} = st[p, {number}]" for number in range(len(self.statics))]
        lines = []
        for line in self.lines:
            depth = line.removesuffix(STATICS)
            lines += [line] if depth == line else [depth + one for one in named]
        return "\n".join(lines) + "\n"

    def scalar(self, expr: Expr) -> str:
        """A tensor-level value; scalars are computed once and kept in a local name."""
        if expr.type.shape == "static":
            text = self.static(expr)
            return f"({text} != 0.0)" if expr.type.dtype == "bool" else text
        return self.names[id(expr)]

    def compute_scalar(self, expr: Expr) -> None:
        """Emit one tensor-level value (its arguments are there already)."""
        if id(expr) in self.names or expr.op in ("group_size",):
            return
        name = self.names[id(expr)] = self.name("s")
        if expr.op in LIBRARY:
            self.library(expr, name)
        elif expr.op == "choose" and expr.type.dtype != "float":
            c, a, b = map(self.scalar, expr.args)
            self.add(f"{name} = {a} if {c} else {b}")
        elif expr.op == "state":
            self.add(f"{name} = f64(s_{expr.value}[tensor])")
        elif expr.op == "adjusted_count":
            self.add(f"{name} = f64(count_{self.names[id(expr.args[0])]})")
        elif expr.op == "count_kept":
            self.add(f"{name} = {self.kept_count(str(expr.value or expr.type.of))}")
        elif expr.op.startswith("reduce_"):
            self.kept_reduction(expr, name)
        else:
            self.add(f"{name} = {tensor(expr, list(map(self.scalar, expr.args)))}")

    def kept_count(self, selection: str) -> str:
        return f"k_{selection}"

    def kept_reduction(self, expr: Expr, name: str) -> None:
        raise NotImplementedError

    def library(self, expr: Expr, name: str) -> None:
        raise NotImplementedError

    # element and group values

    def lifted(self, expr: Expr) -> str:
        """A name (or literal) for a value that is constant over a loop, float32 or int32."""
        arg = expr.args[0]
        literal = literal_text(arg, expr.type.dtype)
        if literal:
            return literal
        if arg.type.shape == "group":
            return self.group(arg)
        key = id(expr)
        if key not in self.names:
            self.names[key] = self.local[key] = self.name("h")
            value = self.scalar(arg)
            cast = {"float": "f32", "int": "i32", "bool": "bool"}[expr.type.dtype]
            self.add(f"{self.names[key]} = {cast}({value})")
        return self.names[key]

    def group(self, expr: Expr) -> str:
        """A group-level value, in a local name."""
        if id(expr) in self.names:
            return self.names[id(expr)]
        text = self.group_text(expr)
        name = self.names[id(expr)] = self.local[id(expr)] = self.name("v")
        self.add(f"{name} = {text}")
        return name

    def group_text(self, expr: Expr) -> str:
        if expr.op == "lift":
            return self.lifted(expr)
        if expr.op == "group_size":
            return "f32(m)"
        if expr.op == "field":
            return self.field_value(expr)
        if expr.op.startswith("reduce_"):
            return self.reduction(expr)
        return element(expr, [self.group(a) for a in expr.args])

    def field_value(self, expr: Expr) -> str:
        raise NotImplementedError

    def reduction(self, expr: Expr) -> str:
        raise NotImplementedError

    def prepare(self, *roots: Expr) -> None:
        """Give names to everything constant over the loop that is about to be emitted."""
        for e in walk(*roots, into=self.made_here):
            if e.op == "lift" and e.type.shape in ("n", "kept", "group"):
                self.lifted(e)
            elif e.op == "bucket" and not self.filled(e) and -id(e.args[1]) not in self.names:
                table = self.names[id(e.args[1])]
                self.names[-id(e.args[1])] = self.local[-id(e.args[1])] = f"{table}_starts"
                self.add(f"{table}_starts, {table}_shift = starts_of({table}, n)")

    def filled(self, e: Expr) -> str:
        """The part of an array of the whole tensor that holds a tile's values of e, or nothing."""
        return f"{self.buckets[id(e)]}_" if self.where == "tile" and id(e) in self.buckets else ""

    def made_here(self, e: Expr) -> bool:
        """Whether the loop computes a value from others, which need names, too."""
        return e.op != "lift" or e.args[0].type.shape == "group"

    def draw(self, number: int, element: str) -> None:
        """Emit the keys of a stream of draws, for elements around `element`."""
        self.add(f"r{number}h = {element} >> 32")
        self.add(
            f"r{number} = stream(u64(seed), u64(step), u64(tensor), u64({number}), u64(r{number}h))"
        )
        self.add(f"r{number}a = u32(r{number} >> u64(32))")
        self.add(f"r{number}b = u32(r{number} & u64(0xFFFFFFFF))")
        self.add(f"r{number}c = counter(u32({element}), r{number}a)")

    def draw_piece(self, x: Expr) -> None:
        """Emit the keys of x's draws for a walk over a piece as a whole, all of whose elements
        `alike` tells to have the same keys: the numbers of few pieces pass a multiple of 2**32."""
        self.add("e = first")
        for number in draws(x):
            self.draw(number, "first")
        if draws(x):
            self.add("alike = first >> 32 == (first + n) >> 32")

    def text(self, expr: Expr, i: str) -> str:
        """The value of an element expression at index i.

        Within a loop over elements, what a large expression repeats becomes a statement of it.
        """
        if self.turn or not self.within(*LOOPS):
            return self.turn.get(id(expr)) or self.written(expr, i)
        for e in repeated(expr, self.given):
            name = self.name("t")
            self.add(f"{name} = {self.written(e, i)}")
            self.turn[id(e)] = name
        text = self.turn.get(id(expr)) or self.written(expr, i)
        self.turn.clear()
        return text

    def given(self, e: Expr) -> bool:
        """Whether a value has a name, or another way to it than its arguments."""
        return id(e) in self.buffers or e.op == "lift" or e.type.shape == "table"

    def written(self, expr: Expr, i: str) -> str:
        """An element expression written out."""
        if id(expr) in self.buffers:
            return f"{self.buffers[id(expr)]}[{i}]"
        if tile := self.filled(expr):
            return f"{tile}[{i}]"
        if expr.type.shape == "table":
            return self.names[id(expr)]
        if expr.op == "lift":
            return self.lifted(expr)
        if expr.op == "uniform":
            spread = f"spread[{i}]" if self.where == "tile" else f"weyl(u32({i}))"
            return f"uniform({spread}, r{expr.value}c, r{expr.value}b)"
        if expr.op == "code":
            return self.code_text(expr, i)
        if expr.op == "bucket" and self.within(*LOOPS):
            return self.bucket(expr, i)
        if not expr.args:
            return self.leaf(expr, i)
        return element(expr, [self.text(a, i) for a in expr.args])

    def bucket(self, expr: Expr, i: str) -> str:
        """How many edges are not above a value: between what `starts_of` says of its key and of the
        next, the last one first (equal edges are many where gradients are zero), then by halving.

        As statements, since arrays that a function takes are counted, which cost 20 ns a call.
        """
        table, name = self.names[id(expr.args[1])], self.name("t")
        self.add(f"k{name} = i64(key({self.text(expr.args[0], i)}))")
        self.add(f"b{name} = (k{name} + 2147483648) >> {table}_shift")
        self.add(f"{name} = i32({table}_starts[b{name}])")
        self.add(f"u{name} = i32({table}_starts[b{name} + 1])")
        with self.block(f"if {name} < u{name} and i64(key({table}[u{name} - 1])) <= k{name}:"):
            self.add(f"{name} = u{name}")
        with self.block(f"while {name} < u{name}:"):
            self.add(f"m{name} = ({name} + u{name}) >> 1")
            with self.block(f"if i64(key({table}[m{name}])) <= k{name}:"):
                self.add(f"{name} = i32(m{name} + 1)")
            with self.block("else:"):
                self.add(f"u{name} = i32(m{name})")
        return name

    def code_text(self, expr: Expr, i: str) -> str:
        field = next(f for f in self.module.fields if f.name == expr.value)
        if field.name in self.codes:
            return f"i_of_u({self.codes[field.name]}[{i}])"
        return f"i_of_u({self.coded(field.bits, expr.args[0], i)})"

    def coded(self, bits: int, expr: Expr, i: str) -> str:
        """The packed code of an element's value, which is rounded down: `floor` changes nothing."""
        if expr.op == "floor" and expr.type.dtype == "float" and id(expr) not in self.buffers:
            expr = expr.args[0]
        return code(bits, expr, self.text(expr, i))

    def leaf(self, expr: Expr, i: str) -> str:
        raise NotImplementedError


def literal_text(expr: Expr, dtype: str) -> str:
    """A constant of the spec as a typed literal, or nothing."""
    while expr.op in ("float", "int", "lift") and expr.args:
        expr = expr.args[0]
    if expr.op != "const" or dtype not in ("float", "int") or not abs(expr.value) < 1e30:
        return ""
    return f"f32({float(expr.value)!r})" if dtype == "float" else f"i32({int(expr.value)})"


def draws(*roots: Expr) -> list[int]:
    """Numbers of the random draws below these expressions."""
    return sorted({int(e.value) for e in walk(*roots) if e.op == "uniform"})


def size_text(f: Field, tile: int) -> str:
    """Bytes of a field of fixed size, as text over n and tiles."""
    if f.shape == "table":
        return str(4 * int(f.of))
    if f.shape == "scalar":
        return str(f.item_bits // 8)
    if f.shape == "group":
        return f"tiles * {f.item_bits // 8}"
    if f.trits:
        return f"(n // {tile}) * {f.packed_bytes(tile)} + (n % {tile} + 4) // 5"
    if f.packed:
        return f"(n // {tile}) * {tile * f.bits // 8} + ((n % {tile}) * {f.bits} + 7) // 8"
    return f"n * {f.item_bits // 8}"
