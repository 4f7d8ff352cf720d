"""Singular values and vectors: see [Note: CUDA singular vectors] in spectra.cuh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compll.backends.cuda.array_values import element
from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import Domain
from compll.backends.cuda.views import View
from compll.ir.expr import Expr
from compll.ir.tile import Value


@dataclass(frozen=True)
class Spectrum:
    """Of a matrix with a shorter side of r, in a kernel: vectors float64 [r, r], a row each; lengths
    float64 [r]; order int32 [r], the longest first."""

    view: View
    vectors: Callable[[Body], str]
    lengths: Callable[[Body], str]
    order: Callable[[Body], str]


def spectrum(p: Any, m: Expr) -> Spectrum:
    """Of a matrix; made once. p: the ArrayPrinter."""
    if id(m) not in p.spectra:
        p.spectra[id(m)] = make_spectrum(p, m)
    found: Spectrum = p.spectra[id(m)]
    return found


def make_spectrum(p: Any, m: Expr) -> Spectrum:
    """The Gram matrix, its eigenvectors, their products' lengths."""
    view, threads = p.array(m), p.plan.shape.threads

    def memory(kind: str, dtype: str = "float64", factor: int = 1) -> Callable[[Body], str]:
        name, grid = p.plan.fresh(kind), p.plan.grid(Domain(kind, "", m.type.dims), 1)
        return lambda b: b.memory(name, dtype, grid, factor)

    def kernel(what: str, kind: str, text: Callable[[Body, str], str]) -> None:
        grid = p.plan.grid(Domain(kind, "", m.type.dims), 1) if kind else -1
        with p.printer.kernel(what, grid, threads) as b:
            b.add(f"{text(b, view.text(b))};")

    gram, vectors, parts = memory("square"), memory("square"), memory("grams")
    lengths, order, angles = memory("short"), memory("short", "int32"), memory("short", factor=2)
    squares = memory("squares")
    kernel("parts", "gram", lambda b, m: f"gram_part<{threads}>({m}, own, {parts(b)})")
    kernel("gram", "", lambda b, m: f"gram_sums({m}, {parts(b)}, {gram(b)})")
    kernel("eigenvectors", "", lambda b, m: (
        f"eigenvectors({gram(b)}, {vectors(b)}, {angles(b)}, {m}.shorter())"))  # fmt: skip
    kernel("squares", "lengths", lambda b, m: (
        f"square_part<{threads}>({m}, own, {vectors(b)}, {squares(b)})"))  # fmt: skip
    kernel("lengths", "", lambda b, m: f"by_length({squares(b)}, {m}, {lengths(b)}, {order(b)})")
    return Spectrum(view, vectors, lengths, order)


def value(p: Any, e: Expr) -> Value:
    """An element of the row of singular values."""
    one = spectrum(p, e.args[0])
    return element(e, lambda b, i, _: f"(float){one.lengths(b)}[{one.order(b)}[{i}]]")


def vector(p: Any, e: Expr) -> Value:
    """An element of a vector: of the shorter side, or of a product with such a one."""
    one, left = spectrum(p, e.args[0]), str(e.op == "left_vectors").lower()

    def text(b: Body, i: str, _: list[str]) -> str:
        given = f"{one.view.text(b)}, {one.vectors(b)}, {one.lengths(b)}, {one.order(b)}"
        return f"vector_at<{left}>({given}, {i}, {b.dim(e.type.dims[1])})"

    return element(e, text)
