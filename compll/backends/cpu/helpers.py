"""Functions that the kernels of a module share; each is built on first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from compll.backends.cpu import trit_tiles
from compll.backends.cpu.builder import I8, I64, PTR, VOID, Builder, at, loop, number
from compll.backends.cpu.instructions import traced
from compll.backends.cpu.storages import code_bytes
from compll.ir.module import Field
from compll.numerics import draws


class Helpers:
    """Functions that kernels of a module share; each is built on first use."""

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self.built: dict[str, ir.Value] = {}

    def get(
        self, name: str, result: ir.Type, kinds: list[ir.Type], body: Callable[..., Any], *, inline: bool = False
    ) -> ir.Value:  # fmt: skip
        """The function of this name; body(builder, *arguments) gives its result. inline: LLVM may
        inline it, for functions that loops call. Copies of other functions would only take time to
        compile."""
        if name not in self.built:
            function = ir.Function(self.module, ir.FunctionType(result, kinds), name)
            function.linkage = "internal"
            if not inline:
                function.attributes.add("noinline")
            self.built[name] = function
            b = Builder(function.append_basic_block("entry"))
            found = body(b, *function.args)
            b.ret_void() if result == VOID else b.ret(found)
        return self.built[name]

    @property
    def keys(self) -> ir.Value:
        """The function that computes keys of a stream of draws (see [Note: random draws] in
        draws.py)."""
        return self.get("keys", I64, [I64] * 5, traced(draws.keys), inline=True)

    def codes(self, f: Field, tile: int, *, wide: bool) -> ir.Value:
        """The function that turns codes of a shorter tile into those of a full one (wide), or
        back."""
        name = f"{'widen' if wide else 'narrow'}_{'trits' if f.trits else f.bits}_{tile}"

        def body(b: Builder, source: ir.Value, into: ir.Value, m: ir.Value) -> None:
            full, short = number(I64, f.packed_bytes(tile)), code_bytes(b, f, m)
            widths = (short, full) if wide else (full, short)
            repack = trit_tiles.repack if f.trits else partial(_repack, bits=f.bits)
            repack(b, source, into, m, *widths)

        return self.get(name, VOID, [PTR, PTR, I64], body)


def _repack(
    b: Builder,
    source: ir.Value,
    into: ir.Value,
    m: ir.Value,
    from_width: ir.Value,
    to_width: ir.Value,
    *,
    bits: int,
) -> None:
    """Move each of m codes from its place in `source` to that in `into`, which is zeroed before."""
    with loop(b, to_width) as j:
        b.store(number(I8, 0), at(b, into, j))
    with loop(b, m) as i:
        byte = b.load(at(b, source, b.urem(i, from_width)), typ=I8)
        shift = b.trunc(b.mul(b.udiv(i, from_width), number(I64, bits)), I8)
        code = b.and_(b.lshr(byte, shift), number(I8, (1 << bits) - 1))
        place = at(b, into, b.urem(i, to_width))
        moved = b.shl(code, b.trunc(b.mul(b.udiv(i, to_width), number(I64, bits)), I8))
        b.store(b.or_(b.load(place, typ=I8), moved), place)
