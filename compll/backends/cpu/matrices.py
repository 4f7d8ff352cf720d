"""Matrix products, orthonormal bases and the Hadamard transform on the CPU, by compiled routines.

They give the numbers of numerics/matrices.py, bit for bit. Each is compiled when first asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.backends.cpu import jit
from compll.backends.cpu.interface import LETTERS, ROUTINES, SLACK, passed
from compll.numerics import matrices as numbers_of
from compll.numerics import numbers
from compll.numerics.matrices import Algebra
from compll.numerics.numbers import sum_units
from compll.numerics.types import F32, F64, I32

#: columns of a result up to which rows are taken eight at a time
NARROW = 16
#: rows of a matrix that are taken together, by `product` and `across`
EIGHT, FOUR = 8, 4
#: a row's keys for `top_columns` are a multiple of these
MANY = 64


class Matrix(NamedTuple):
    """A matrix of which products are made: x, or x * scale + residual * decay, in rows of `cols`.

    The last row may end early; zeros follow it. The residual is float32, or uint16 with the bits of
    bfloat16.
    """

    x: F32
    cols: int
    scale: np.float32 = np.float32(1)
    residual: NDArray[Any] | None = None
    decay: float = 1.0

    @property
    def rows(self) -> int:
        """Also the one that ends early."""
        return -(-len(self.x) // self.cols)

    @property
    def storage(self) -> str:
        """The residual's; "" without one."""
        return "" if self.residual is None else storage(self.residual)

    def end(self, first: int, rows: int) -> Matrix:
        """The elements from row `first` on, and zeros up to so many rows."""

        def part(x: NDArray[Any]) -> NDArray[Any]:
            found = np.zeros(rows * self.cols, x.dtype)
            found[: len(x) - first * self.cols] = x[first * self.cols :]
            return found

        residual = None if self.residual is None else part(self.residual)
        return self._replace(x=part(self.x), residual=residual)


def storage(residual: NDArray[Any]) -> str:
    """How a residual is kept."""
    return "bfloat16" if residual.dtype == np.uint16 else "float32"


@cache
def routine(name: str, *kinds: str) -> Callable[..., None]:
    """A routine; arrays, whose elements it takes as they are, are given as they are."""
    key = " ".join(("routine", name, *kinds))

    def text() -> str:
        from compll.backends.cpu import routines  # takes longer than to load an object

        return routines.text(name, kinds)

    image = jit.stored("_".join((name, *filter(None, kinds))), key, text, level=1)
    library = jit.Library(image, {name: [LETTERS[letter] for letter in ROUTINES[name]]})

    def call(*args: Any, library: jit.Library = library) -> None:
        library.functions[name](*map(passed, args))

    return call


def plain(x: NDArray[Any], dtype: type[Any] = np.float32) -> NDArray[Any]:
    """An array as routines take it, which a view of a payload may not be."""
    return np.require(x, dtype, ["C", "A"])


def padded(b: F32, rows: int) -> F64:
    """float64, with zeros to so many rows and an even number of columns."""
    found = np.zeros((rows, b.shape[1] + b.shape[1] % 2))
    found[: b.shape[0], : b.shape[1]] = b
    return found


def narrow(m: Matrix, b: F32) -> F32:
    """m @ b, for few columns of b."""
    right = padded(b, m.cols)
    width, whole = right.shape[1], len(m.x) // m.cols // EIGHT * EIGHT
    out = np.empty((b.shape[1], m.rows), np.float32)
    parts = [(m, whole)] if whole else []
    if whole < m.rows:
        parts.append((m.end(whole, EIGHT), EIGHT))
    done = 0
    for part, count in parts:
        found = np.empty((width, count), np.float32)
        given = (part.x, part.scale, part.residual, part.decay, count, m.cols, right, width, found)
        routine("product", part.storage)(*given)
        some = min(count, m.rows - done)
        out[:, done : done + some] = found[: b.shape[1], :some]
        done += some
    return np.ascontiguousarray(out.T)


def across(m: Matrix, b: F32) -> F32:
    """transpose(m) @ b, for few columns of b."""
    whole = len(m.x) // m.cols // FOUR * FOUR
    right = padded(b, whole + FOUR)
    width = right.shape[1]
    total = np.zeros((width, m.cols))
    parts = [(m, whole, right)] if whole else []
    if whole < m.rows:
        parts.append((m.end(whole, FOUR), FOUR, right[whole:]))
    for part, count, factor in parts:
        given = (part.x, part.scale, part.residual, part.decay, count, m.cols, factor, width, total)
        routine("across", m.storage)(*given)
    return np.ascontiguousarray(total[: b.shape[1]].T, np.float32)


class Factors(NamedTuple):
    """Two matrices in the type of their product's sums, float32 or float64."""

    left: NDArray[Any]
    right: NDArray[Any]


def factors(a: F32, b: F32, short: bool) -> Factors:
    """Two matrices for `write`; see [Note: order of matrix products]."""
    sums = np.float32 if short else np.float64
    return Factors(plain(a, sums), plain(b, sums))


def write(out: F32, of: Factors, *, add: bool = False) -> None:
    """Write the first elements of a product to out, or add them."""
    given = (of.left, *of.left.shape, of.right, of.right.shape[1], out, len(out))
    effect = "add" if add else "set"
    routine("rows", of.left.dtype.name, effect)(*given, 1.0, None, 1.0, False)


def settle(m: Matrix, of: Factors, *, back: bool) -> None:
    """Keep in the residual what a product leaves of x * scale + residual * decay.

    back: x becomes the product.
    """
    given = (of.left, *of.left.shape, of.right, of.right.shape[1], m.x, len(m.x))
    step = routine("rows", of.left.dtype.name, m.storage)
    step(*given, m.scale, m.residual, m.decay, back)


def product(a: F32, b: F32, short: bool) -> F32:
    """a @ b, whichever way a lies in memory."""
    if short or b.shape[1] > NARROW:
        out = np.empty((a.shape[0], b.shape[1]), np.float32)
        write(out.reshape(-1), factors(a, b, short))
        return out
    if not a.flags.c_contiguous and a.T.flags.c_contiguous:
        return across(Matrix(plain(a.T).reshape(-1), a.shape[0]), b)
    return narrow(Matrix(plain(a).reshape(-1), a.shape[1]), b)


def orthonormal(a: F32, spare: F32) -> F32:
    """Orthonormal columns that span those of a, or of spare."""
    found, step = np.zeros(1, np.int64), routine("direction")

    def direction(basis: F64, column: int) -> bool:
        step(basis, column, basis.shape[1], found)
        return bool(found[0])

    return numbers_of.orthonormal(a, spare, direction)


def hadamard(x: F32, block: int) -> F32:
    """The transform of each run; see [Note: hadamard]."""
    out = np.empty_like(x := plain(x))
    for start, size in numbers_of.runs(len(x), block):
        end = start + (len(x) - start) // size * size
        run, factor = out[start:end], np.float32(size**-0.5)
        if size < 16:
            run[:] = numbers_of.hadamard(x[start:end], size)
        else:
            given = (x[start:end], run, end - start, size.bit_length() - 1, factor)
            routine("hadamard")(*given)
    return out


def row_extreme(m: F32, largest: bool) -> F32:
    """The largest or smallest element of each row, [rows, 1], whichever way m lies in memory."""
    limit = np.iinfo(np.int32).max
    keys = np.full(m.shape[0], -limit if largest else limit, np.int32)
    turned = not m.flags.c_contiguous and m.T.flags.c_contiguous
    given = plain(m.T if turned else m)
    routine("extreme", "max" if largest else "min", "column" if turned else "row")(
        given, *given.shape, keys
    )
    return numbers.from_key(keys)[:, None]


def gather(m: Matrix, at: NDArray[np.int64]) -> tuple[F32, NDArray[Any]]:
    """The elements at these positions, and what the residual holds there, if there is one."""
    found = np.empty(len(at), np.float32)
    held = np.empty(
        len(at) if m.storage else 0, np.float32 if m.residual is None else m.residual.dtype
    )
    given = (m.x, m.scale, m.residual, m.decay, plain(at, np.int64), len(at), found, held)
    routine("gather", m.storage)(*given)
    return found, held


def scatter(out: NDArray[Any], at: NDArray[np.int64], values: NDArray[Any], effect: str) -> None:
    """Values go to their positions ("put"), where the others become zero ("set"), or are added.

    out: float32, or uint16 with the bits of bfloat16, which are only put.
    """
    values = plain(values, out.dtype.type)
    given = (out, out.nbytes, plain(at, np.int64), len(at), values)
    routine("scatter", out.dtype.name, effect)(*given)


def sum_by(index: I32, x: F32, size: int) -> F32:
    """See numbers.sum_by."""
    up, down = sum_units(x)
    if math.isnan(up):
        return np.full(size, np.nan, np.float32)
    sums = np.zeros(size, np.int64)
    routine("sum_by")(plain(index, np.int32), plain(x), len(x), up, sums, size)
    with np.errstate(over="ignore"):
        return (sums.astype(np.float64) * down).astype(np.float32)


def top_columns(m: F32, k: int, *, magnitudes: bool = False) -> I32:
    """See numerics.matrices.top_columns; magnitudes: of abs(m)."""
    rows, cols = m.shape
    few = min(k, cols)
    found = np.empty(rows * few + SLACK, np.int32)  # more is written than stays
    keys = np.full(-(-cols // MANY) * MANY, np.iinfo(np.int32).min, np.int32)
    routine("top_columns", "magnitude" if magnitudes else "key")(
        plain(m), rows, cols, few, found, keys
    )
    out = found[:-SLACK].reshape(rows, few)
    return out if few == k else np.pad(out, ((0, 0), (0, k - few)), constant_values=-1)


def place_columns(at: I32, x: F32, cols: int) -> F32:
    """See numerics.matrices.place_columns."""
    out = np.empty((len(at), cols), np.float32)
    places, inside = numbers_of.flat_places(at, cols)
    scatter(out.reshape(-1), places[inside], x[inside], "set")
    return out


COMPILED = Algebra(
    product, orthonormal, hadamard, sum_by, numbers_of.lookup, place_columns, row_extreme,
    top_columns, numbers_of.fed, numbers_of.left,
)  # fmt: skip
