"""Routines of the CPU backend's kernels, called by themselves."""

import ctypes
from functools import cache

import numpy as np
from llvmlite import ir

from compll.backends.cpu import jit
from compll.backends.cpu.instructions import function
from compll.backends.cpu.interface import SLACK
from compll.backends.reference import routines
from compll.ir.storage import STORAGES
from compll.numerics.bits import order_key
from compll.routines import tables
from compll.routines.streams import STREAMS

ADDRESS, WORD = ctypes.c_void_p, ctypes.c_int64
KINDS = {"store": [ADDRESS, WORD, WORD, ADDRESS], "load": [ADDRESS, WORD, WORD, WORD, ADDRESS]}


class Library:
    """Routines by names, with these kinds of arguments."""

    def __init__(self, name: str, routines: dict, kinds: dict, result=WORD) -> None:
        module = ir.Module(name)
        symbols = {}
        for key, routine in routines.items():
            function = routine.of(module)
            function.linkage = ""  # no longer of this module alone
            symbols[key] = function.name
        image = jit.machine().emit_object(jit.optimized(str(module)))
        builder = jit.llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
        for symbol in symbols.values():
            builder.export_symbol(symbol)
        self.linked = builder.link(jit.linker(), f"test_{name}")
        self.functions = {
            key: ctypes.CFUNCTYPE(result, *kinds[key])(self.linked[symbol])
            for key, symbol in symbols.items()
        }


class Stream(Library):
    """Positions as the bytes of a storage; with `runs` and `huffman`, whose n is bits, bytes."""

    def __init__(self, storage: str) -> None:
        super().__init__(storage, {k: function(getattr(STREAMS[storage], k)) for k in KINDS}, KINDS)
        self.item = np.uint8 if storage in ("runs", "huffman") else np.int32

    def store(self, values: np.ndarray, n: int, out: np.ndarray) -> int:
        """Write positions below n; returns their number of bytes."""
        given = np.zeros(len(values) + 1, self.item)
        given[0], given[1:] = np.array(-1).astype(self.item), values
        first, start = given.ctypes.data + given.itemsize, out.ctypes.data
        return self.functions["store"](first, len(values), n, start)

    def load(self, data: np.ndarray, count: int, n: int) -> list[int] | None:
        """Read `count` positions below n; None if the bytes are malformed."""
        held = np.array([*data, 0], np.uint8)
        found, start = np.zeros(count + SLACK, self.item), held.ctypes.data
        good = self.functions["load"](start, len(data), count, n, found.ctypes.data)
        return found[:count].tolist() if good else None


@cache
def _quantiles(parts: int) -> Library:
    kinds = {"find": [ADDRESS, WORD, ADDRESS, ADDRESS, ADDRESS]}
    return Library(
        f"quantiles{parts}", {"find": function(tables.quantiles, parts=parts)}, kinds, None
    )


def quantiles(x: np.ndarray, parts: int) -> np.ndarray:
    """The parts - 1 numbers that divide the sorted x into parts."""
    keys, out = order_key(x), np.zeros(parts - 1, np.float32)
    some, other = np.zeros_like(keys), np.zeros_like(keys)
    first, *rest = (a.ctypes.data for a in (keys, some, other, out))
    _quantiles(parts).functions["find"](first, len(x), *rest)
    return out


class InPython:
    """The same by functions of Python."""

    def __init__(self, storage: str) -> None:
        self.storage = STORAGES[storage]

    def store(self, values: np.ndarray, n: int, out: np.ndarray) -> int:
        data = routines.stored(self.storage, values, n, len(out))
        out[: len(data)] = data
        return len(data)

    def load(self, data: np.ndarray, count: int, n: int) -> list[int] | None:
        found = routines.loaded(self.storage, data, count, n)
        return None if found is None else found.tolist()


PRINTERS = {"cpu": Stream, "python": InPython}


@cache
def stream(storage: str, printer: str) -> Stream | InPython:
    """The functions of a storage, compiled once."""
    return PRINTERS[printer](storage)
