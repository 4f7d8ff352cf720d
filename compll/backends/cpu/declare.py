"""How kernels are declared: with their signatures, compiled when they are asked for.

cpu/object.py compiles a module's at once; where that cannot be, numba one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

#: numba's options of every kernel
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


class Declared(NamedTuple):
    """A kernel: its function, and the signatures to compile it for, as numba spells them."""

    function: Callable[..., Any]
    signatures: tuple[str, ...]

    def numbas(self) -> Any:
        """Compiled by numba, or from its cache."""
        from numba import njit

        return njit(list(self.signatures), cache=True, **OPTIONS)(self.function)


def kernel(*signatures: str) -> Callable[[Callable[..., Any]], Declared]:
    """Declare a function as a kernel with these signatures."""
    return lambda function: Declared(function, signatures)


def declared(module: Any) -> dict[str, Declared]:
    """The kernels of a module, by name."""
    return {name: one for name, one in vars(module).items() if isinstance(one, Declared)}


def by_numba(module: Callable[[], Any]) -> Callable[[str], Any]:
    """What gives a kernel of a module by its name, compiled by numba."""
    return cache(lambda name: getattr(module(), name).numbas())
