"""States of 16 bits in CPU kernels: their uint16 words to float32 and back.

See [Note: 16-bit states] in halves.py.
"""

from __future__ import annotations

from typing import Any

from numba import types

from compll.backends.cpu.ops import F32, HALF, I16, I32, _c, _primitive, f32

__all__ = [
    "held_bfloat16", "held_float16", "kept_bfloat16", "kept_float16", "u16",
    "word_bfloat16", "word_float16",
]  # fmt: skip
u16 = types.uint16
#: the bits of the least magnitudes that are rounded to infinity
TOO_LARGE = {"bfloat16": 0x7F7F8000, "float16": 0x477FF000}


def _held(storage: str, b: Any, word: Any) -> Any:
    if storage == "float16":
        return b.fpext(b.bitcast(word, HALF), F32)
    return b.bitcast(b.shl(b.zext(word, I32), _c(16)), F32)


def _word(storage: str, b: Any, x: Any) -> Any:
    """The word of a value that is finite when rounded, as int32."""
    if storage == "float16":
        return b.zext(b.bitcast(b.fptrunc(x, HALF), I16), I32)
    raw = b.bitcast(x, I32)
    odd = b.and_(b.lshr(raw, _c(16)), _c(1))
    return b.lshr(b.add(b.add(raw, _c(0x7FFF)), odd), _c(16))


def _kept(storage: str, b: Any, x: Any, before: Any) -> Any:
    size = b.and_(b.bitcast(x, I32), _c(0x7FFFFFFF))
    fits = b.icmp_signed("<", size, _c(TOO_LARGE[storage]))
    # as int32, whose vectors have the lanes that the condition has
    return b.trunc(b.select(fits, _word(storage, b, x), b.zext(before, I32)), I16)


def _holding(storage: str) -> Any:
    """Its value, of a word."""
    return _primitive(f32, (u16,), lambda c, b, v: _held(storage, b, v[0]))


def _wording(storage: str) -> Any:
    """Its word, of a value that is one of its type."""
    return _primitive(u16, (f32,), lambda c, b, v: b.trunc(_word(storage, b, v[0]), I16))


def _keeping(storage: str) -> Any:
    """What a word becomes that is given a value."""
    return _primitive(u16, (f32, u16), lambda c, b, v: _kept(storage, b, *v))


held_bfloat16, held_float16 = _holding("bfloat16"), _holding("float16")
word_bfloat16, word_float16 = _wording("bfloat16"), _wording("float16")
kept_bfloat16, kept_float16 = _keeping("bfloat16"), _keeping("float16")
