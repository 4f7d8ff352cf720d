"""How kernels are declared: with their signatures, compiled when they are asked for.

cpu/object.py compiles a module's at once; where that cannot be, numba one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

#: numba's options of every kernel
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
#: in which a residual is kept; uint16 holds bfloat16's bits
RESIDUALS = ("float32", "uint16")


class Declared(NamedTuple):
    """A kernel: its function, and the signatures to compile it for, as numba spells them."""

    function: Callable[..., Any]
    signatures: tuple[str, ...]

    def keeping(self, residual: str) -> Declared:
        """For a residual of this type alone, one of RESIDUALS, where it has any."""
        halves = tuple(one for one in self.signatures if "uint16[" in one)
        others = tuple(one for one in self.signatures if one not in halves)
        return Declared(
            self.function, (halves if residual == "uint16" else others) or self.signatures
        )

    def numbas(self) -> Any:
        """Compiled by numba, or from its cache."""
        from numba import njit

        return njit(list(self.signatures), cache=True, **OPTIONS)(self.function)


def kernel(*signatures: str) -> Callable[[Callable[..., Any]], Declared]:
    """Declare a function as a kernel with these signatures."""
    return lambda function: Declared(function, signatures)


def loop(arguments: str) -> Callable[[Callable[..., Any]], Declared]:
    """Declare a loop written by hand for these arguments.

    {} is the type of a residual, float32 or uint16 (bfloat16); {f} that of the factors of a product.
    """
    kinds = RESIDUALS if "{}" in arguments else ("",)
    sums = ("float32", "float64") if "{f}" in arguments else ("",)
    return kernel(*(f"void({arguments.format(kind, f=f)})" for kind in kinds for f in sums))


def declared(module: Any) -> dict[str, Declared]:
    """The kernels of a module, by name."""
    return {name: one for name, one in vars(module).items() if isinstance(one, Declared)}


def by_numba(module: Callable[[], Any]) -> Callable[[str], Any]:
    """What gives a kernel of a module by its name, compiled by numba."""
    return cache(lambda name: getattr(module(), name).numbas())
