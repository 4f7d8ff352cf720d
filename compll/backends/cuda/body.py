"""The text of one kernel, and values of a piece in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager

from compll.backends.cuda import instructions
from compll.backends.cuda.instructions import C_TYPES, MEMORY, Lines
from compll.backends.cuda.plans import PlanBuilder
from compll.ir.expr import Expr
from compll.ir.module import HALVES, Field
from compll.ir.tile import SIZES, Array, Domain, Value


def state_params(states: Iterable[Array]) -> tuple[str, ...]:
    """Parameters for states, as C declarations."""
    return tuple(f"{state_type(s)}* __restrict__ a_{s.name}" for s in states)


def state_type(s: Array) -> str:
    """C type of a state's element."""
    return MEMORY[s.storage.name] if s.storage.name in HALVES else "float"


#: declarations about a piece, made on first use
PIECE = {
    "n": "const i64 n = table[5 * p + 1];",
    "tensor": "const i64 tensor = table[5 * p + 2];",
    "offset": "const i64 offset = table[5 * p + 3];",
    "step": "const u64 step = base_step + (tick ? *tick : 0);",
    "xs": "XT* const xs = x + table[5 * p];",
    "payload": "u8* const payload = out + at[p];",
    "incoming": "const u8* const incoming = data + at_in[p];",
}


class Body:
    """The text within a kernel's braces.

    grid: number of the grid of its blocks, of which block `own` is the piece's; -1: a block per
    piece. Declarations about the piece come before the lines; a block per piece makes them where
    they are first needed, since they may follow from numbers that it computes.
    """

    def __init__(self, plan: PlanBuilder, grid: int, threads: int) -> None:
        self.plan, self.grid, self.threads = plan, grid, threads
        #: blocks that must fit a multiprocessor, which bounds the registers; 0: as the compiler likes
        self.resident = 0
        self.head, self.lines = Lines(depth=1), Lines(depth=1)
        self.declarations = self.lines if grid < 0 else self.head
        if grid < 0:
            self.head.add("const int p = blockIdx.x;")
        else:
            self.head.add(f"const i64* const firsts = first + {grid} * (pieces + 1);")
            self.head.add("const int p = find(firsts, pieces, blockIdx.x);")
            self.head.add("const i64 own = (i64)blockIdx.x - firsts[p];")
        if plan.merges:
            # a block's elements stay in the cache from payload to payload
            self.head.add("for (int q = 0; q < payloads; ++q, at_in += pieces) {")
        #: true if its threads may find the piece's payload bad
        self.checks = False
        self.hoisted: set[str] = set()
        self.named: dict[Hashable, str] = {}
        self.fresh = 0

    def __str__(self) -> str:
        return f"{self.head}{self.lines}" + "  }\n" * self.plan.merges

    def add(self, line: str) -> None:
        """Add a line at the present depth."""
        self.lines.add(line)

    def call(self, function: str, *args: object) -> None:
        """Add a call of a function."""
        self.add(f"{function}({', '.join(map(str, args))});")

    def first(self, line: str) -> None:
        """Add a line for the block's first thread."""
        self.add(f"if (threadIdx.x == 0) {line}")

    def skip(self, condition: str) -> None:
        """Have the block do nothing more if a condition holds."""
        self.declarations.add(f"if ({condition}) return;")

    def skip_bad(self) -> None:
        """Have the block do nothing for a bad payload. If blocks of this kernel may find it bad
        meanwhile, threads of a block would read one or the other, and part at its barriers: then
        all do as any of them reads."""
        indent = "  " * self.declarations.depth

        def line() -> str:
            bad = "__syncthreads_or(wrong[p])" if self.checks else "wrong[p]"
            return f"{indent}if ({bad}) return;"

        self.declarations.lines.append(line)

    def bad(self) -> str:
        """Arguments of a function that may find the piece's payload bad."""
        self.checks = True
        return "wrong + p, errors"

    def refuse(self, condition: str, why: int = 1) -> None:
        """Have a check find the piece's payload bad if a condition holds; why: see REASONS."""
        self.add(f"if ({condition}) refuse({self.bad()}, {why});")

    def block(self, head: str, end: str = "}") -> AbstractContextManager[None]:
        """Braces around the lines added within the `with`."""
        return self.lines.block(head, end)

    def name(self, prefix: str) -> str:
        """A new name."""
        self.fresh += 1
        return f"{prefix}{self.fresh}"

    def declare(self, kind: str, text: str, prefix: str = "v") -> str:
        """Declare a value at the present place; returns its name."""
        name = self.name(prefix)
        self.add(f"const {kind} {name} = {text};")
        return name

    def hoist(self, name: str, declaration: str = "") -> str:
        """A name that is declared once."""
        if name not in self.hoisted:
            self.hoisted.add(name)
            self.declarations.add(declaration or PIECE[name])
        return name

    def given(self, name: str) -> str:
        """An integer of the piece, by its name in PIECE."""
        return self.hoist(name)

    # places in payloads

    def payload(self, array: Array) -> str:
        """Pointer to a payload field, to one that the kernel is given, or to a sum."""
        if array.role == "sum":
            return self.plan.sums[array.name]
        return f"({self.given(array.role)} + {self.value(self.plan.kernel.starts[array])})"

    def field(self, f: Field) -> str:
        """Pointer to a field of the payload that is stored, or decoded."""
        return self.payload(Array.of(f, "incoming" if self.plan.decodes else "payload"))

    def length(self, f: Field) -> str:
        """Bytes of a field of varying length in the payload that is decoded."""
        return self.value(self.plan.kernel.sizes[Array.of(f, "incoming")])

    # integers of the piece

    def dim(self, expr: Expr) -> str:
        """Rows or columns, as text."""
        if expr.op == "const":
            return str(max(1, int(expr.value)))
        pool = self.plan.module.pool
        number = self.plan.static(pool.make("max", (expr, pool.const(1)), expr.type))
        name = f"dim{number}"
        return self.hoist(name, f"const i64 {name} = (i64){self.plan.host_scalar(number)};")

    def items(self, domain: Domain) -> str:
        """The number of items of a domain."""
        if domain.kind == "matrix":
            rows, cols = map(self.dim, domain.dims)
            return f"({rows} * {cols})"
        return self.kept(domain.of)

    def kept(self, selection: str) -> str:
        """Elements of a selection; "": of the piece."""
        return self.value(self.plan.kernel.counts[selection])

    def among(self, selection: str) -> str:
        """Number of elements among which the selection chooses."""
        return self.kept(self.plan.module.among(selection))

    # arrays of the piece

    def first_item(self, grid: int, of: str = "p") -> str:
        """The first item of a grid of piece `of`, among those of all pieces."""
        return f"item_at[{grid} * (pieces + 1) + {of}]"

    def of_blocks(self, name: str, grid: int) -> str:
        """The piece's part of an array with a value for each block of a grid, and their number, as
        two arguments."""
        begin = self.first_block(grid)
        return f"{name} + {begin}, {self.first_block(grid, of='p + 1')} - {begin}"

    def first_block(self, grid: int, of: str = "p") -> str:
        """The first block of a grid of piece `of`, among those of all pieces."""
        return f"first[{grid} * (pieces + 1) + {of}]"

    def memory(
        self, name: str, dtype: str, grid: int, factor: int = 1, *, kept: bool = False
    ) -> str:
        """The piece's part of scratch memory with `factor` values per item of a grid."""
        self.plan.memory(name, dtype, grid, factor, kept=kept)
        kind = MEMORY.get(dtype, "float")
        item = "p" if grid < 0 else self.first_item(grid)
        return self.hoist(f"p_{name}", f"{kind}* const p_{name} = {name} + {item} * (i64){factor};")

    def parts(self, f: Value, name: str, grid: int) -> str:
        """Memory for a fold's parts of a total: of tiles if it is a sum, which has an order; else of
        blocks, which are numbered among those of all pieces."""
        if f.attr == "sum":
            return self.memory(name, "uint32", grid)
        return self.plan.of_blocks(name, "uint32", grid)

    def elements(self, array: Array) -> str:
        """The piece's part of the gradient, of a state or of a scratch array."""
        if array.role == "gradient":
            return self.given("xs")
        if array.role == "state":
            text = f"{state_type(array)}* const s_{array.name} = a_{array.name}"
            return self.hoist(f"s_{array.name}", f"{text} + table[5 * p + 4];")
        tile, storage = self.plan.shape.tile, array.storage
        grid, name = self.plan.tiles(array.domain), self.plan.memory_of(array)
        if storage.packed:
            return self.memory(name, "uint8", grid, storage.tile_bytes(tile))
        return self.memory(name, storage.name, grid, tile)

    # numbers of the piece

    def slot(self, key: Hashable, kind: str) -> str:
        """A number that this kernel or an earlier one has left."""
        if key not in self.named:
            name, held = self.name("s"), f"held<{C_TYPES[kind]}>({self.plan.place(key)})"
            self.named[key] = self.hoist(name, f"const {C_TYPES[kind]} {name} = {held};")
        return self.named[key]

    def leave(self, key: Hashable, name: str) -> None:
        """Leave a number, by its name here, for other kernels; stored if one of them reads it."""
        self.named[key] = name
        self.plan.left.add(key)
        indent = "  " * self.lines.depth

        def line() -> str:
            store = f"{self.plan.place(key)} = slot_of({name});" if key in self.plan.slots else ""
            return store and f"{indent}if (threadIdx.x == 0) {store}"

        self.lines.lines.append(line)

    def leave_length(self, f: Field, text: str) -> None:
        """Leave the length of a payload field."""
        self.leave(("length", f.name), self.declare("i64", text))

    def value(self, v: Value) -> str:
        """A value of the piece: its name here."""
        if v.op == "const":
            return instructions.literal(v)
        if v.op == "size":
            return self.given("n")
        if v.op in SIZES:
            return self.slot((v.op, v.attr), v.kind)
        if v in self.plan.left:
            return self.slot(v, v.kind)
        if v not in self.named:
            text = self.text(v)
            name = self.name("s")
            kind = "auto" if v.kind == "table" else C_TYPES[v.kind]
            self.named[v] = self.hoist(name, f"const {kind} {name} = {text};")
        return self.named[v]

    def text(self, v: Value) -> str:
        if v in self.plan.elsewhere:
            return f"({C_TYPES[v.kind]}){self.plan.elsewhere[v]}"
        if v.op in ("scale", "workers"):
            return v.op
        if v.op == "static":
            number = self.plan.host_scalar(v.attr)
            return f"{number} != 0.0" if v.kind == "bool" else f"({C_TYPES[v.kind]}){number}"
        if v.op == "used":
            return "used_in[p]"
        if v.op == "header":  # 0 if the payload is too short for it
            place = f"{self.given('incoming')} + {v.attr}"
            return f"used_in[p] < {v.attr + 4} ? 0 : load_uint32({place})"
        if v.kind == "table":
            return self.table(v)
        if v.op == "load":
            return f"({C_TYPES[v.kind]}){self.loaded(v.attr)}"
        return instructions.text(v, [self.value(a) for a in v.args])

    def table(self, v: Value) -> str:
        """A table: a payload's, or one that a step made."""
        if v.op == "buckets":
            return self.value(v.args[0])
        if v.attr.received:
            return f"Table<false>{{{self.payload(v.attr)}}}"
        return self.memory(self.plan.memory_of(v.attr), "float32", -1, int(v.attr.domain.of))

    def loaded(self, array: Array) -> str:
        """A state of one number, or a number of a payload."""
        if array.role == "state":
            return f"a_{array.name}[{self.given('tensor')}]"
        return f"load_{array.storage.name}({self.payload(array)})"
