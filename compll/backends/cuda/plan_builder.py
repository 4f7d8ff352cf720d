"""A plan under construction: its kernels' texts, launches, grids and scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from compll.backends.cuda.grids import Grid, Launch, Scratch, Shape
from compll.backends.cuda.plans import Plan
from compll.ir.expr import Expr
from compll.ir.tile import ELEMENTS, Array, Domain, Kernel, Value

#: parameters of every kernel; states and scratch memory follow
ENCODE = (
    "XT* __restrict__ x", "const i64* table", "const i64* first", "const i64* item_at", "int pieces",
    "u8* __restrict__ out", "const i64* at", "const double* st", "u64 seed", "u64 base_step",
    "const u64* tick", "float scale", "int back", "i64* used",
)  # fmt: skip
TAKEN = ("const u8* __restrict__ data", "const i64* at_in")  # of an encode that takes a payload in
DECODE = (
    "XT* __restrict__ x", "const i64* table", "const i64* first", "const i64* item_at", "int pieces",
    "const u8* __restrict__ data", "const i64* at_in", "const i64* used_in", "const double* st",
    "u64 base_step", "const u64* tick", "u32* errors", "int payloads",
)  # fmt: skip


class PlanBuilder:
    """Collects what kernels need while they are made. left: numbers of a piece that one kernel
    leaves for others, by identity; slots: places of those that others read."""

    def __init__(
        self, name: str, kernel: Kernel, shape: Shape, params: tuple[str, ...], *,
        decodes: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.kernel, self.shape, self.given = name, kernel, shape, params
        self.module, self.decodes = kernel.module, decodes
        self.statics = [*kernel.statics]
        #: true if a check marked bad payloads
        self.checks = False
        #: true if its kernel adds several payloads of each piece
        self.merges = False
        #: launches, their bounds, and their kernels' Bodies
        self.kernels: list[tuple[Launch, str, object]] = []
        self.grids: list[Grid] = [Grid(ELEMENTS, shape.teams, tiles=True)]
        self.scratch: dict[str, Scratch] = {}
        #: names of scratch arrays' memory
        self.owned: dict[Array, str] = {}
        self.left: set[Hashable] = set()
        self.slots: dict[Hashable, int] = {}
        #: pointers to sums over the ranks, by the field
        self.sums: dict[str, str] = {}
        #: texts of elements that are computed on each read, from a kernel and an index
        self.elements: dict[Array, Callable[[Any, str], str]] = {}
        self.names = 0
        #: values that are in memory of their own, and the texts of their places
        self.elsewhere: dict[int, tuple[Value, str]] = {}

    def fresh(self, prefix: str) -> str:
        """A new name."""
        self.names += 1
        return f"{prefix}{self.names}"

    def static(self, expr: Expr) -> int:
        """The index of a value that the host computes."""
        known = next((i for i, e in enumerate(self.statics) if e is expr), None)
        if known is None:
            self.statics.append(expr)
        return len(self.statics) - 1 if known is None else known

    def grid(self, domain: Domain, per_block: int, *, tiles: bool = False) -> int:
        """The number of a grid."""
        wanted = Grid(domain, per_block, tiles)
        if wanted not in self.grids:
            self.grids.append(wanted)
        return self.grids.index(wanted)

    def tiles(self, domain: Domain) -> int:
        """The grid of a domain's tiles; 0 for those of the piece."""
        return self.grid(domain, self.shape.teams, tiles=True)

    def memory(
        self, name: str, dtype: str, grid: int, factor: int = 1, *, of: str = "items"
    ) -> str:
        """Scratch memory (see Scratch); its name in kernels."""
        wanted = Scratch(name, dtype, grid, factor, of)
        assert self.scratch.setdefault(name, wanted) == wanted, wanted
        return name

    def own(self, array: Array) -> str:
        """The name of a scratch array's memory. Numbers tell apart arrays of equal names."""
        text = "".join(ch if ch.isalnum() else "_" for ch in array.name)
        return self.owned.setdefault(array, f"own{len(self.owned)}_{text}")

    def of_blocks(self, name: str, dtype: str, grid: int, factor: int = 1) -> str:
        """Scratch memory for each block of a grid."""
        return self.memory(name, dtype, grid, factor, of="blocks")

    def place(self, key: Hashable) -> str:
        """The place of a number of a piece that is kept between kernels."""
        self.left.add(key)
        return f"sc[p * {self.name}_slots + {self.slots.setdefault(key, len(self.slots))}]"

    def known(self, number: int) -> str:
        """A number that the host computes for each piece."""
        return f"st[p * {self.name}_statics + {number}]"

    def launch(
        self, what: str, grid: int, threads: int, body: object, repeat: Expr | int | None = None,
        resident: int = 0,
    ) -> None:  # fmt: skip
        """Add the next step: a kernel, by its Body."""
        name = f"{self.name}_{what}{len(self.kernels)}"
        bounds = f"{threads}, {resident}" if resident else str(threads)
        self.kernels.append((Launch(name, grid, threads, repeat), bounds, body))

    def text(self) -> str:
        """The text of all kernels, once all of them are known."""
        counts = {"statics": len(self.statics), "slots": len(self.slots)}
        found = [
            f"constexpr int {self.name}_{k} = {count};\n" for k, count in counts.items() if count
        ]
        params = ", ".join(self.params())
        for step, bounds, body in self.kernels:
            head = f'extern "C" __global__ void __launch_bounds__({bounds}) {step.kernel}({params})'
            found.append(f"{head} {{\n{body}}}\n")
        return "".join(found)

    def params(self) -> tuple[str, ...]:
        """Parameters of every kernel."""
        return (*self.given, *(s.declaration for s in self.memories()))

    def memories(self) -> tuple[Scratch, ...]:
        """All scratch memory."""
        slots = [Scratch("sc", "uint64", -1, len(self.slots))] if self.slots else []
        return (*self.scratch.values(), *slots)

    def plan(self, writes_back: bool) -> Plan:
        """The plan, for the host."""
        states = tuple(s.name for s in self.kernel.states)
        return Plan(
            tuple(step for step, _, _ in self.kernels), self.params(), tuple(self.statics),
            tuple(self.grids), self.memories(), states, writes_back, tuple(self.kernel.rooms),
        )  # fmt: skip
