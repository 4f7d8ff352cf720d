"""What CUDA encode and decode kernels share: values of every level as text, and heads of kernels.

Unlike the CPU backend no shared value gets a buffer: a tile's elements are in registers and its
loops unrolled, so the compiler finds common subexpressions itself, where they are not too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from compll.backends.cuda.grids import Grid, Scratch, Step, shape_of
from compll.backends.cuda.patterns import (
    constant,
    counted,
    draw_below_less_one,
    negative_bit,
    opposite,
    own_power,
    unsigned,
)
from compll.backends.cuda.text import C_TYPE, Lines, code, element, literal, tensor
from compll.ir.expr import Expr, walk
from compll.ir.layout import tile_of
from compll.ir.module import Field, Module
from compll.passes.ranges import bounds
from compll.passes.repeats import repeated


class Values(Lines):
    """Emits expressions; knows which values already have a name."""

    fixed_params: tuple[str, ...]

    def __init__(self, module: Module, prefix: str, threads: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.module, self.tile = module, tile_of(module)
        self.shape = shape_of(self.tile, threads)
        self.fields = {f.name: f for f in module.fields}
        self.statics: list[Expr] = []
        self.slots: dict[int, int] = {}
        self.grids: list[Grid] = [Grid("tiles", self.shape.tiles)]
        self.scratch: list[Scratch] = []
        self.steps: list[Step] = []
        self.names: dict[int, str] = {}
        self.turn: dict[int, str] | None = None
        self.fresh = 0

    def name(self, prefix: str) -> str:
        """A new local name."""
        self.fresh += 1
        return f"{prefix}{self.fresh}"

    def declare(self, expr: Expr, kind: str, prefix: str, text: str) -> str:
        """Name a value in the present block."""
        name = self.names[id(expr)] = self.name(prefix)
        self.add(f"const {kind} {name} = {text};")
        return name

    def grid(self, kind: str, per_block: int, arg: Expr | str = "") -> int:
        """The number of a grid."""
        wanted = Grid(kind, per_block, arg)
        if wanted not in self.grids:
            self.grids.append(wanted)
        return self.grids.index(wanted)

    def memory(self, name: str, dtype: str, per: str, factor: int = 1) -> str:
        """Ask for scratch memory; its name in kernels."""
        if name not in {s.name for s in self.scratch}:
            self.scratch.append(Scratch(name, dtype, per, factor))
        return name

    @contextmanager
    def kernel(
        self, name: str, grid: int, threads: int, repeat: Expr | None = None, resident: int = 1
    ) -> Iterator[None]:
        """The head and braces of a kernel, which becomes the next step.

        resident: blocks that a multiprocessor must be able to hold, which bounds their registers.
        """
        name = f"{self.prefix}_{name}"
        self.steps.append(Step(name, grid, threads, repeat))
        self.names.clear()
        self.add('extern "C" __global__ void')
        bounds = f"{threads}, {resident}" if resident > 1 else f"{threads}"
        with self.block(f"__launch_bounds__({bounds}) {name}(@PARAMS@)"):
            yield

    def params(self) -> tuple[str, ...]:
        """Of every kernel, as C declarations; known when all kernels are."""
        return (*self.fixed_params, *(s.declaration for s in self.scratch))

    def finished(self) -> str:
        """The text of all kernels."""
        return str(self).replace("@PARAMS@", ", ".join(self.params()))

    # static and tensor-level values

    def static(self, expr: Expr) -> str:
        """A host-computed value: an element of the piece's row of statics."""
        known = next((i for i, e in enumerate(self.statics) if e is expr), None)
        if known is None:
            known = len(self.statics)
            self.statics.append(expr)
        text = f"st[p * statics + {known}]"
        return f"({text} != 0.0)" if expr.type.dtype == "bool" else text

    def scalar(self, expr: Expr) -> str:
        """A tensor-level value: a name in this kernel, or one that an earlier kernel left."""
        if expr.type.shape == "static":
            return self.static(expr)
        if id(expr) not in self.names:
            text = f"sc[p * @SLOTS@ + {self.slots[id(expr)]}]"
            self.declare(expr, "double", "s", text)
        return self.names[id(expr)]

    def arithmetic(self, expr: Expr) -> str:
        """A tensor-level operator as text."""
        return tensor(expr, list(map(self.scalar, expr.args)))

    # element and group values

    def lifted(self, expr: Expr) -> str:
        """A name (or literal) for a value that is constant over a loop."""
        (arg,) = expr.args
        known = literal(arg, expr.type.dtype)
        if known:
            return known
        if arg.type.shape == "group":
            return self.group(arg)
        if id(expr) not in self.names:
            kind = C_TYPE[expr.type.dtype]
            cast = f"({kind})" if kind != "bool" else "0 != "
            self.declare(expr, kind, "h", f"{cast}({self.scalar(arg)})")
        return self.names[id(expr)]

    def group(self, expr: Expr) -> str:
        """A group-level value, in a local name."""
        if id(expr) not in self.names:
            text = self.group_text(expr)
            self.declare(expr, C_TYPE[expr.type.dtype], "v", text)
        return self.names[id(expr)]

    def group_text(self, expr: Expr) -> str:
        if expr.op == "lift":
            return self.lifted(expr)
        if expr.op == "group_size":
            return "(float)m"
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
        """Name everything that is constant over the piece."""
        for e in walk(*roots):
            if e.op == "lift" and e.args[0].type.shape in ("static", "scalar"):
                self.lifted(e)

    def prepare_groups(self, *roots: Expr) -> None:
        """Name everything that is constant over the group."""
        for e in walk(*roots):
            if e.op == "lift" and e.args[0].type.shape == "group":
                self.group(e.args[0])

    def text(self, expr: Expr) -> str:
        """The value of element `e` of a thread's, at place `i` of the tile.

        What a large expression repeats becomes a statement within it; see repeats.py.
        """
        if self.turn is not None:
            return self.turn.get(id(expr)) or self.written(expr)
        self.turn, parts = {}, []
        for e in repeated(expr, self.given):
            name, text = self.name("t"), self.written(e)
            parts.append(f"const {C_TYPE[e.type.dtype]} {name} = {text};")
            self.turn[id(e)] = name
        text, self.turn = self.turn.get(id(expr)) or self.written(expr), None
        return f"[&] {{ {' '.join(parts)} return {text}; }}()" if parts else text

    def given(self, e: Expr) -> bool:
        """Whether a value has a name, or another way to it than its arguments."""
        return e.op == "lift" or e.type.shape == "table"

    def written(self, expr: Expr) -> str:
        """An expression written out."""
        if expr.op == "lift":
            return self.lifted(expr)
        if expr.op == "uniform":
            return f"uniform((u32)(begin + i), r{expr.value})"
        if expr.op == "int" and draw_below_less_one(expr.args[0]):
            draw, least = expr.args[0].args
            place = f"(u32)(begin + i), r{draw.value}"
            return f"uniform_below_less_one({place}, {self.text(least.args[0])})"
        limits = counted(expr)
        if 2 < len(limits) < 256:
            ones = [f"below({self.text(x)}, (float){bound * 2.0**90!r})" for x, bound in limits]
            return f"how_many({', '.join(ones)})"
        if expr.op == "float" and expr.args[0].type.shape == "n":
            exact = self.converted(expr.args[0])
            if exact:
                return exact
        if opposite(expr):
            taken = [self.text(e) for e in (expr.args[0], *expr.args[2].args)]
            return "({1} + f_where({0}, -{2}, {2}))".format(*taken)
        bit = negative_bit(expr)
        if bit is not None:
            return f"bit_if_negative<{bit}>({self.text(expr.args[0].args[0])})"
        if own_power(expr):
            power_of = self.text(unsigned(expr.args[0]))
            return f"mantissa({self.text(expr.args[0])}, {power_of})"
        if expr.op == "code":
            bits = self.fields[str(expr.value)].bits
            return f"(i32)({code(bits, expr.args[0], self.text(expr.args[0]))})"
        if expr.type.shape == "table":
            return self.table(expr)
        if not expr.args:
            return self.leaf(expr)
        return element(expr, [self.text(a) for a in expr.args])

    def converted(self, whole: Expr) -> str:
        """An integer's float32, where the conversion can be done before: of constants now, of others
        maybe for more than one use; or nothing."""
        if whole.op == "where" and None not in map(constant, whole.args[1:]):
            a, b = (literal(e, "float") for e in whole.args[1:])
            return f"f_where({self.text(whole.args[0])}, {a}, {b})"
        if whole.op in ("add", "sub") and constant(whole.args[1]) is not None:
            largest = max(map(abs, (*bounds(whole), *bounds(whole.args[0]))))
            if largest < 1 << 24:
                sign = "+" if whole.op == "add" else "-"
                other = literal(whole.args[1], "float")
                return f"((float)({self.text(whole.args[0])}) {sign} {other})"
        return ""

    def leaf(self, expr: Expr) -> str:
        raise NotImplementedError

    def table(self, expr: Expr) -> str:
        """Where a table begins, and its size, as two arguments."""
        raise NotImplementedError

    # the parts of every kernel

    def piece(self) -> None:
        """Declarations about the piece p."""
        self.add("const i64 n = table[5 * p + 1];")
        self.add(f"const i64 tiles = (n + {self.tile - 1}) / {self.tile};")

    def place(self) -> None:
        """Declarations of a block over tiles: its piece, and the first of its tiles."""
        s = self.shape
        self.add("const int p = find(first, pieces, blockIdx.x);")
        self.piece()
        self.add(f"const i64 tile_first = ((i64)blockIdx.x - first[p]) * {s.tiles};")
        self.add(f"const int u = threadIdx.x % {s.team}, team = threadIdx.x / {s.team};")

    def load_rows(self, ready: str, source: str, to: str, first: str = "0") -> None:
        """Fill an array with a thread's elements of the rows from `first` on."""
        self.add("#pragma unroll")
        with self.block(f"for (int k = 0; k < {self.shape.held}; ++k)"):
            at = f"({first} + k) * {self.shape.row} + 4 * u"
            length = "4" if ready == "true" else f"m - ({at})"
            self.add(f"load4<{ready}>({source}, o + {at}, {length}, {to} + 4 * k);")

    def take_rows(self, name: str, source: str, array: str, first: str = "0") -> None:
        """The same, from what ready tiles have loaded ahead."""
        s = self.shape
        self.add(f"float {array}[{4 * s.held}];")
        if s.turns == 1:
            self.load_rows("READY", source, array, first)
            return
        with self.block("if (READY)"):
            self.add("#pragma unroll")
            self.add(f"for (int e = 0; e < {4 * s.rows}; ++e) {array}[e] = ahead_{name}[turn][e];")
        with self.block("else"):
            self.load_rows("READY", source, array, first)

    def codes_at(self, f: Field) -> str:
        """Where a field with a value per element begins, as text."""
        raise NotImplementedError

    def fields_ready(self, fields: Iterable[Field]) -> list[str]:
        """Whether words of packed codes, four whole items, and items of groups can be accessed at
        once, as text."""
        some = [f for f in fields if f.shape in ("n", "group") and not f.trits]
        return [f"aligned({self.codes_at(f)}, {bytes_at_once(f)})" for f in some]

    def tile_place(self) -> None:
        """Declarations of a turn: tile t from element o on."""
        s = self.shape
        self.add(f"const i64 t = tile_first + turn * {s.teams} + team, o = t * {self.tile};")

    def tile_head(self, ready: str = "false") -> None:
        """The same, and m elements."""
        self.tile_place()
        whole = f"{ready} || n - o >= {self.tile}"
        self.add(f"const int m = {whole} ? {self.tile} : n > o ? (int)(n - o) : 0;")

    @contextmanager
    def each_tile(
        self, *aligned: str, ahead: dict[str, str] | None = None, leaves: bool = False
    ) -> Iterator[None]:
        """A loop over a team's tiles, compiled for READY ones and for others.

        aligned: the conditions under which whole tiles are ready; see [Note: ready tiles].
        ahead: arrays of gradients' elements (name: source) that all turns of ready tiles load before
        the first is computed, into `ahead_NAME[turn]`.
        leaves: whether a ready tile may return false, for it to be done as others are.
        """
        s = self.shape
        ahead = (ahead or {}) if s.turns > 1 else {}
        for name in ahead:
            self.add(f"float ahead_{name}[{s.turns}][{4 * s.rows}];")
        self.add(f"const bool aligned_ = {' && '.join(aligned) or 'true'};")
        with self.block("const auto tile = [&](auto ready, const int turn)"):
            self.add("constexpr bool READY = decltype(ready)::value;")
            self.tile_head("READY")
            yield
            if leaves:
                self.add("return true;")
        self.lines[-1] += ";"
        end = f"(tile_first + {s.teams * (s.turns - 1)} + team + 1) * {self.tile}"
        turns = f"for (int turn = 0; turn < {s.turns}; ++turn)"
        if leaves:
            self.add("u32 left = FULL;  // turns whose tiles are to be done")
        with self.block(f"if (aligned_ && __all_sync(FULL, n >= {end}))"):
            if leaves:
                self.add("left = 0;")
            if ahead:
                self.add("#pragma unroll")
                with self.block(turns):
                    self.tile_place()
                    for name, source in ahead.items():
                        self.load_rows("true", source, f"ahead_{name}[turn]")
            self.add("#pragma unroll")
            done = "tile(Ready<true>(), turn)"
            self.add(f"{turns} {f'left |= {done} ? 0u : 1u << turn' if leaves else done};")
        if leaves:
            self.add("#pragma unroll 1")
            self.add(f"{turns} if (left >> turn & 1u) tile(Ready<false>(), turn);")
            return
        with self.block("else"):
            self.add("#pragma unroll 1")
            self.add(f"{turns} tile(Ready<false>(), turn);")


def size_text(f: Field, tile: int) -> str:
    """Bytes of a field of fixed size, as text over n and tiles."""
    if f.shape == "scalar":
        return str(f.item_bits // 8)
    if f.shape == "table":
        return str(4 * int(f.of))
    if f.shape == "group":
        return f"tiles * {f.item_bits // 8}"
    if f.trits:
        return f"(n / {tile}) * {f.packed_bytes(tile)} + (n % {tile} + 4) / 5"
    if f.packed:
        return f"(n / {tile}) * {tile * f.bits // 8} + ((n % {tile}) * {f.bits} + 7) / 8"
    return f"n * {f.item_bits // 8}"


def row_ready(pointer: str) -> str:
    """Whether four elements at a time can be accessed at once, as text."""
    return f"aligned({pointer}, 4 * sizeof(*{pointer}))"


def bytes_at_once(f: Field) -> int:
    """Of an access to a payload field by one thread."""
    if f.shape == "group":
        return f.item_bits // 8
    return 4 if f.packed else f.item_bits // 2


def draws(*roots: Expr) -> list[int]:
    """Numbers of the random draws below these expressions."""
    return sorted({int(e.value) for e in walk(*roots) if e.op == "uniform"})
