"""Kernels over the items of a domain: their heads, what stands before their loops, their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.domains import (  # fmt: skip
    C_NAMES,
    ELEMENTS,
    PIECE,
    ArrayPlan,
    Domain,
    Grid,
    Memory,
    Size,
)
from compll.backends.cuda.grids import Step
from compll.backends.cuda.text import Lines
from compll.ir.expr import Expr
from compll.ir.layout import tile_of
from compll.ir.module import Module

#: of every kernel; what a caller gives comes after them
COMMON = (
    "const i64* table", "const i64* first", "const i64* item_at", "const i64* sizes", "int pieces",
    "const double* st", "u64 seed", "u64 base_step", "const u64* tick",
)  # fmt: skip
EACH = 8  # elements of a thread


class Maker:
    """Makes the kernels of one plan. `head` stands before a kernel's loops, `body` are the loops."""

    def __init__(
        self, module: Module, prefix: str, given: tuple[str, ...], threads: int = 256
    ) -> None:
        self.module, self.prefix, self.given, self.threads = module, prefix, given, threads
        self.tile = tile_of(module)
        self.texts: list[str] = []
        self.steps: list[Step] = []
        self.statics: list[Expr] = []
        self.grids: list[Grid] = []
        self.domains: list[Domain] = []
        self.sizes: list[Size] = []
        self.scratch: dict[str, Memory] = {}
        self.rooms: dict[tuple[str, tuple[Expr, ...]], None] = {}
        self.fresh = 0
        self.leaves_wrong = False
        self.open("")

    def name(self, prefix: str) -> str:
        """A new name."""
        self.fresh += 1
        return f"{prefix}{self.fresh}"

    def open(self, own: str) -> None:
        """Begin the text of a kernel."""
        self.head, self.body = Lines(), Lines()
        self.head.depth = self.body.depth = 1
        self.hoisted: set[str] = set()
        self.own = own

    def hoist(self, name: str, declaration: str) -> str:
        """A name declared once, before the loops; its declaration ends with ` =` and the value."""
        if name not in self.hoisted:
            self.hoisted.add(name)
            self.head.add(declaration)
        return name

    def memory(
        self, name: str, dtype: str, domain: Domain, each: int = 1, factor: int = 1
    ) -> Memory:
        """Scratch memory of the plan."""
        known = self.scratch.setdefault(name, Memory(name, dtype, domain, each, factor))
        if each == 1:
            self.domain(domain)
        return known

    def domain(self, domain: Domain) -> int:
        """Its number in the plan."""
        if domain not in self.domains:
            self.domains.append(domain)
        return self.domains.index(domain)

    def item(self, domain: Domain) -> str:
        """The number of the piece's first item among those of all pieces."""
        if domain == PIECE:
            return "p"
        number = self.domain(domain)
        text = f"item_at[{number} * (pieces + 1) + p]"
        return self.hoist(f"at{number}", f"const i64 at{number} = {text};")

    def count(self, domain: Domain) -> str:
        """The items of the piece."""
        if domain == ELEMENTS:
            return "n"
        number = self.domain(domain)
        begin = f"item_at[{number} * (pieces + 1) + p"
        text = f"{begin} + 1] - {begin}]"
        return self.hoist(f"count{number}", f"const i64 count{number} = {text};")

    def held(self, memory: Memory) -> str:
        """The piece's part of scratch memory with a value per item of a domain."""
        name, factor = f"{memory.name}_p", f"{memory.factor} * " if memory.factor > 1 else ""
        text = f"{memory.name} + {factor}{self.item(memory.domain)}"
        return self.hoist(name, f"{C_NAMES[memory.dtype]}* const {name} = {text};")

    def size(self, kind: str, of: str = "", dim: Expr | None = None) -> str:
        """A whole number of the piece."""
        wanted = Size(kind, of, dim)
        if wanted not in self.sizes:
            self.sizes.append(wanted)
        number = self.sizes.index(wanted)
        text = f"sizes[p * @SIZES@ + {number}]"
        return self.hoist(f"size{number}", f"const i64 size{number} = {text};")

    def dim(self, expr: Expr) -> str:
        """Rows or columns."""
        one = expr.op == "const" and expr.value == 1
        return "1" if one else self.size("dim", dim=expr)

    def static(self, expr: Expr) -> str:
        """A host-computed value, a double."""
        known = next((i for i, e in enumerate(self.statics) if e is expr), None)
        if known is None:
            known = len(self.statics)
            self.statics.append(expr)
        text = f"st[p * @STATICS@ + {known}]"
        return f"({text} != 0.0)" if expr.type.dtype == "bool" else text

    def offset(self) -> str:
        return self.hoist("offset", "const i64 offset = table[5 * p + 3];")

    def tensor(self) -> str:
        return self.hoist("tensor", "const u64 tensor = (u64)table[5 * p + 2];")

    def step(self) -> str:
        return self.hoist("step", "const u64 step = base_step + (tick ? *tick : 0);")

    def stream(self, draw: int, high: str, *, seeded: bool = False) -> str:
        """The keys of a draw's stream."""
        seed = "seed" if seeded else "0ull"
        return f"stream({seed}, {self.step()}, {self.tensor()}, (u64)({draw}ll), (u64)({high}))"

    @contextmanager
    def kernel(
        self, what: str, domain: Domain, per_block: int, threads: int | None = None
    ) -> Iterator[None]:
        """A kernel, the next step: block `own` of the blocks of piece p."""
        name = f"{self.prefix}_{what}{len(self.steps)}"
        threads = threads or self.threads
        self.open(name)
        if domain == PIECE:
            self.steps.append(Step(name, -1, threads))
            self.head.add("const int p = blockIdx.x;")
        else:
            self.steps.append(Step(name, self.grid(domain, per_block), threads))
            number = self.steps[-1].grid
            self.head.add(f"const i64* const firsts = first + {number} * (pieces + 1);")
            self.head.add("const int p = find(firsts, pieces, blockIdx.x);")
            self.head.add("const i64 own = (i64)blockIdx.x - firsts[p];")
        self.head.add("const i64 n = table[5 * p + 1];")
        self.head.add(f"if (n == 0{' || wrong[p]' if self.leaves_wrong else ''}) return;")
        yield
        self.texts.append(
            f'extern "C" __global__ void\n__launch_bounds__({threads}) {name}(@PARAMS@) {{\n'
            f"{self.head}{self.body}}}\n"
        )

    def grid(self, domain: Domain, per_block: int) -> int:
        wanted = Grid(domain, per_block)
        self.domain(domain)
        if wanted not in self.grids:
            self.grids.append(wanted)
        return self.grids.index(wanted)

    @contextmanager
    def over(self, what: str, domain: Domain) -> Iterator[str]:
        """A kernel with a loop over the items of a domain; yields the item's number."""
        chunk = EACH * self.threads
        with self.kernel(what, domain, chunk):
            count = self.count(domain)
            self.head.add(f"const i64 begin = own * {chunk};")
            self.head.add(f"const i64 end = {count} - begin < {chunk} ? {count} : begin + {chunk};")
            with self.body.block(
                f"for (i64 i = begin + threadIdx.x; i < end; i += {self.threads})"
            ):
                yield "i"

    def declare(self, kind: str, text: str) -> str:
        """Name a value at the present place of the body."""
        name = self.name("v")
        self.body.add(f"const {kind} {name} = {text};")
        return name

    def finished(self) -> str:
        """The text of all kernels."""
        params = ", ".join(self.params())
        text = "\n".join(self.texts).replace("@PARAMS@", params)
        return text.replace("@SIZES@", str(len(self.sizes))).replace(
            "@STATICS@", str(len(self.statics))
        )

    def params(self) -> tuple[str, ...]:
        """Of every kernel, as C declarations."""
        return (*COMMON, *self.given, *(m.declaration for m in self.scratch.values()))

    def plan(self, states: tuple[str, ...] = ()) -> ArrayPlan:
        """What the kernels need."""
        return ArrayPlan(
            tuple(self.steps), self.params(), tuple(self.statics), tuple(self.grids),
            tuple(self.domains), tuple(self.sizes), tuple(self.scratch.values()),
            tuple(self.rooms), states,
        )  # fmt: skip
