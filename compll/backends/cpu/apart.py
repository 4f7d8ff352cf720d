"""Parts of a kernel as functions of their own, so that each can use all registers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import VOID, Builder

#: attributes of a Printer that hold values of the function that it builds, by name
KNOWN = ("given", "row", "pointers", "local")


@contextmanager
def apart(printer: Any, name: str) -> Iterator[None]:
    """Build the body of the `with` as a function of its own, and a call of it here.

    The function gets all values that the kernel knows so far; LLVM removes unused ones.
    """
    p, outer = printer, printer.b
    before = {what: getattr(p, what) for what in KNOWN}
    values = [v for known in before.values() for v in known.values()]
    values = list({id(v): v for v in values if not isinstance(v, ir.Constant)}.values())
    kind = ir.FunctionType(VOID, [v.type for v in values])
    function = ir.Function(p.module, kind, p.module.get_unique_name(name))
    function.linkage = "internal"
    function.attributes.add("noinline")
    inside = {id(v): arg for v, arg in zip(values, function.args, strict=True)}
    for what, known in before.items():
        setattr(p, what, {key: inside.get(id(v), v) for key, v in known.items()})
    p.b = Builder(function.append_basic_block("entry"))
    yield
    p.b.ret_void()
    p.b = outer
    for what, known in before.items():
        setattr(p, what, known)
    outer.call(function, values)
