"""Singular values and vectors: see [Note: CUDA singular vectors] in spectra.cuh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import Domain
from compll.ir.tile import Call

Element = Callable[[Body, str], str]


def elements(p: Any, view: Callable[[Body], str], call: Call) -> tuple[Element, Element, Element]:
    """Elements of left vectors, of values and of right vectors: from the Gram matrix, its
    eigenvectors, and lengths of their products. p: the Calls."""
    matrix, threads = call.views[0].matrix, p.plan.shape.threads
    assert matrix is not None

    def memory(kind: str, dtype: str = "float64", factor: int = 1) -> Callable[[Body], str]:
        name, grid = p.plan.fresh(kind), p.plan.grid(Domain(kind, "", matrix.dims), 1)
        return lambda b: str(b.memory(name, dtype, grid, factor))

    def kernel(what: str, kind: str, text: Callable[[Body, str], str]) -> None:
        with p.blocks(what, Domain(kind, "", matrix.dims), threads=threads) as b:
            b.add(f"{text(b, view(b))};")

    gram, vectors, parts = memory("square"), memory("square"), memory("grams")
    lengths, order, angles = memory("short"), memory("short", "int32"), memory("short", factor=2)
    squares = memory("squares")
    kernel("parts", "gram", lambda b, m: f"gram_part<{threads}>({m}, own, {parts(b)})")
    kernel("gram", "piece", lambda b, m: f"gram_sums({m}, {parts(b)}, {gram(b)})")
    kernel("eigenvectors", "piece", lambda b, m: (
        f"eigenvectors({gram(b)}, {vectors(b)}, {angles(b)}, {m}.shorter())"))  # fmt: skip
    kernel("squares", "lengths", lambda b, m: (
        f"square_part<{threads}>({m}, own, {vectors(b)}, {squares(b)})"))  # fmt: skip
    kernel(
        "lengths", "piece", lambda b, m: f"by_length({squares(b)}, {m}, {lengths(b)}, {order(b)})"
    )

    def vector(left: str) -> Element:
        def text(b: Body, i: str) -> str:
            assert call.matrix is not None
            given = f"{view(b)}, {vectors(b)}, {lengths(b)}, {order(b)}"
            return f"vector_at<{left}>({given}, {i}, {b.value(call.matrix.cols)})"

        return text

    values = lambda b, i: f"(float){lengths(b)}[{order(b)}[{i}]]"  # noqa: E731
    return vector("true"), values, vector("false")
