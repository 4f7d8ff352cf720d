"""Packed codes: tiles of any size, and those of selected elements; see [Note: packing]."""

from __future__ import annotations

import numpy as np
from numba import njit

from compll.backends.cpu.ops import pack2, pack4, pack8, plane1, plane2, plane4

__all__ = ["pack_all", "pack_tail", "unpack_all", "unpack_tail"]


@njit(nogil=True, cache=True)
def pack_tail(codes, out, at, count, bits):  # type: ignore[no-untyped-def]
    """Pack a tile of fewer than its full number of elements."""
    width = (count * bits + 7) // 8
    for j in range(width):
        byte = np.uint8(0)
        for p in range(8 // bits):
            i = j + p * width
            if i < count:
                byte = np.uint8(byte | np.uint8(codes[i] << (p * bits)))
        out[at + j] = byte


@njit(nogil=True, cache=True)
def unpack_tail(data, at, codes, count, bits):  # type: ignore[no-untyped-def]
    """Inverse of pack_tail."""
    width = (count * bits + 7) // 8
    mask = (1 << bits) - 1
    for i in range(count):
        codes[i] = np.uint8((data[at + i % width] >> ((i // width) * bits)) & mask)


@njit(nogil=True, cache=True)
def pack_tile(codes, out, at, count, bits):  # type: ignore[no-untyped-def]
    """Pack as many codes as fill whole bytes of all planes."""
    w = count * bits // 8
    o = out[at : at + w]
    if bits == 1:
        a, b, c, d = codes[:w], codes[w : 2 * w], codes[2 * w : 3 * w], codes[3 * w : 4 * w]
        e, f = codes[4 * w : 5 * w], codes[5 * w : 6 * w]
        g, h = codes[6 * w : 7 * w], codes[7 * w : 8 * w]
        for j in range(w):
            o[j] = pack8(a[j], b[j], c[j], d[j], e[j], f[j], g[j], h[j])
    elif bits == 2:
        a, b, c, d = codes[:w], codes[w : 2 * w], codes[2 * w : 3 * w], codes[3 * w : 4 * w]
        for j in range(w):
            o[j] = pack4(a[j], b[j], c[j], d[j])
    elif bits == 4:
        a, b = codes[:w], codes[w : 2 * w]
        for j in range(w):
            o[j] = pack2(a[j], b[j])
    else:
        for j in range(w):
            o[j] = codes[j]


@njit(nogil=True, cache=True)
def unpack_tile(data, at, codes, count, bits):  # type: ignore[no-untyped-def]
    """Inverse of pack_tile."""
    w = count * bits // 8
    packed = data[at : at + w]
    for p in range(8 // bits):
        shift, part = np.uint8(p * bits), codes[p * w : (p + 1) * w]
        if bits == 1:
            for j in range(w):
                part[j] = plane1(packed[j], shift)
        elif bits == 2:
            for j in range(w):
                part[j] = plane2(packed[j], shift)
        elif bits == 4:
            for j in range(w):
                part[j] = plane4(packed[j], shift)
        else:
            for j in range(w):
                part[j] = packed[j]


@njit(nogil=True, cache=True)
def pack_all(codes, out, at, count, bits, tile):  # type: ignore[no-untyped-def]
    """Pack `count` codes, tile after tile; a tile is a multiple of eight."""
    for t in range(0, count, tile):
        size = min(tile, count - t)
        if size == tile:
            pack_tile(codes[t : t + tile], out, at, tile, bits)
        else:
            pack_tail(codes[t:], out, at, size, bits)
        at += (size * bits + 7) // 8


@njit(nogil=True, cache=True)
def unpack_all(data, at, codes, count, bits, tile):  # type: ignore[no-untyped-def]
    """Inverse of pack_all."""
    for t in range(0, count, tile):
        size = min(tile, count - t)
        if size == tile:
            unpack_tile(data, at, codes[t : t + tile], tile, bits)
        else:
            unpack_tail(data, at, codes[t:], size, bits)
        at += (size * bits + 7) // 8
