"""Functions that are built from instructions and stand once in a module, beside numba's.

Inlined wherever they are used, they would take LLVM a second for kernels with several selections;
as functions of numba, every call would count references to every array. They take addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir


def called(
    b: Any, name: str, values: list[Any], build: Callable[..., Any], result: Any = None
) -> Any:
    """Call NAME, which build(b, *arguments) builds and gives the result of, if the module lacks it.

    result: the type of what it returns; None for nothing.
    """
    function = b.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result or ir.VoidType(), [value.type for value in values])
        function = ir.Function(b.module, kind, name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        found = build(inner, *function.args)
        inner.ret(found) if result else inner.ret_void()
    return b.call(function, values)
