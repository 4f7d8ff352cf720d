"""Functions that the kernels of a module share; each is built on first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from compll.backends.cpu import trit_tiles
from compll.backends.cpu.builder import I8, I64, PTR, VOID, Builder, at, loop, number
from compll.backends.cpu.storages import code_bytes
from compll.ir.module import Field
from compll.numerics.numbers import MASK


class Helpers:
    """Functions that kernels of a module share; each is built on first use."""

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self.built: dict[str, Any] = {}

    def get(
        self, name: str, result: Any, kinds: list[Any], body: Callable[..., Any], *, inline: bool = False
    ) -> Any:  # fmt: skip
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
    def keys(self) -> Any:
        """The function that computes keys of a stream of draws (see [Note: random draws] in
        numbers.py)."""
        return self.get("keys", I64, [I64] * 5, _keys, inline=True)

    def codes(self, f: Field, tile: int, *, wide: bool) -> Any:
        """The function that turns codes of a shorter tile into those of a full one (wide), or
        back."""
        name = f"{'widen' if wide else 'narrow'}_{'trits' if f.trits else f.bits}_{tile}"

        def body(b: Builder, source: Any, into: Any, m: Any) -> None:
            full, short = number(I64, f.packed_bytes(tile)), code_bytes(b, f, m)
            widths = (short, full) if wide else (full, short)
            repack = trit_tiles.repack if f.trits else partial(_repack, bits=f.bits)
            repack(b, source, into, m, *widths)

        return self.get(name, VOID, [PTR, PTR, I64], body)


def _keys(b: Builder, *words: Any) -> Any:
    def c(value: int) -> Any:
        return number(I64, value & MASK)

    state = c(0)
    for word in words:
        x = b.add(b.xor(state, word), c(0x9E3779B97F4A7C15))
        x = b.mul(b.xor(x, b.lshr(x, c(30))), c(0xBF58476D1CE4E5B9))
        x = b.mul(b.xor(x, b.lshr(x, c(27))), c(0x94D049BB133111EB))
        state = b.xor(x, b.lshr(x, c(31)))
    return state


def _repack(
    b: Builder, source: Any, into: Any, m: Any, from_width: Any, to_width: Any, *, bits: int
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
