"""A generated CUDA source: its text, and the launches that make an encode or a decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from compll.backends.cuda import traced_functions
from compll.backends.cuda.grids import Grid, Launch, Scratch, Shape
from compll.ir.expr import Expr
from compll.ir.tile import Kernel

#: C types of gradients
GRADIENTS = {"float32": "float", "float16": "Float16", "bfloat16": "Bfloat16"}


@dataclass(frozen=True)
class Plan:
    """The launches of an encode or a decode, in order.

    Plans: "encode" (no state), "feed" (with states), "set" and "add" (decode), and those of rounds.
    params: of every kernel, as C declarations. statics: host-computed values, a row per piece.
    writes_back: encode itself overwrites the gradient with its decoded value. rooms: kind
    ("matrix", "flat" or "") and dimensions of matrices; see check_rooms.
    """

    steps: tuple[Launch, ...]
    params: tuple[str, ...]
    statics: tuple[Expr, ...]
    grids: tuple[Grid, ...]
    scratch: tuple[Scratch, ...]
    states: tuple[str, ...] = ()
    writes_back: bool = False
    rooms: tuple[tuple[str, tuple[Expr, ...]], ...] = ()


@dataclass
class Source:
    """The generated text (without the prelude) and its plans by name.

    merges: the plan "add" adds several payloads of each piece in one launch. hops: the encodes that
    take in a payload, for a source of their own.
    """

    text: str
    shape: Shape
    plans: dict[str, Plan] = field(default_factory=dict)
    merges: bool = False
    hops: list[Kernel] = field(default_factory=list)

    def full(self, gradient: str = "float32") -> str:
        """The whole text for a compiler, for gradients of this dtype."""
        return f"{prelude()}\ntypedef {GRADIENTS[gradient]} XT;\n{self.text}"


@cache
def prelude() -> str:
    """The functions that all kernels share."""
    others = ("searches", "codes", "streams", "huffman")
    first = (numbers(), header("prelude"), traced_functions.in_payloads())
    return "".join([*first, *map(header, others)])


@cache
def numbers() -> str:
    """The functions of single numbers."""
    return header("numbers") + traced_functions.text()


@cache
def header(name: str) -> str:
    """A file of functions that kernels call."""
    return (Path(__file__).parent / "include" / f"{name}.cuh").read_text()
