"""States in CUDA kernels: float, or 16 bits by the types of halves.cuh."""

from __future__ import annotations

from compll.ir.module import HALVES, Module

TYPES = {"float16": "Float16", "bfloat16": "Bfloat16"}


class Kept:
    """How kernels take, read and write the states of a module."""

    def __init__(self, module: Module) -> None:
        self.halves = {s.name: TYPES[s.storage] for s in module.states if s.storage in HALVES}

    def kind(self, name: str) -> str:
        """The type of an element."""
        return self.halves.get(name, "float")

    def params(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The parameters of a kernel that is given these states."""
        return tuple(f"{self.kind(s)}* __restrict__ a_{s}" for s in names)

    def view(self, name: str) -> str:
        """The declaration of a piece's part."""
        return f"{self.kind(name)}* const s_{name} = a_{name} + table[5 * p + 4];"

    def read(self, name: str, text: str) -> str:
        """An element's value."""
        return f"(float){text}" if name in self.halves else text

    def value(self, name: str, y: str, before: str) -> str:
        """What an element is that was `before` and is given y."""
        if name in self.halves:
            return f"taken_up<{self.halves[name]}>({y}, (float){before})"
        return f"finite({y}) ? {y} : {before}"

    def put(self, name: str, at: str, i: str, value: str) -> str:
        """Store what `value` gave."""
        if name in self.halves:
            return f"put1({at}, {i}, {value});"
        return f"{at}[{i}] = {value};"

    def keep(self, name: str, at: str, i: str, y: str) -> str:
        """Give an element y, which it takes up where that is finite."""
        if name in self.halves:
            return f"keep1({at}, {i}, {y});"
        return f"if (finite({y})) {at}[{i}] = {y};"
