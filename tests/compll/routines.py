"""Routines of the CPU backend's kernels, called by themselves."""

import ctypes
from functools import cache

import numpy as np
from llvmlite import ir

from compll.backends.cpu import jit
from compll.backends.cpu.helpers import Helpers
from compll.backends.cpu.interface import SLACK
from compll.backends.cpu.printer import STREAMS

ADDRESS, WORD = ctypes.c_void_p, ctypes.c_int64
KINDS = {"store": [ADDRESS, WORD, WORD, ADDRESS], "load": [ADDRESS, ADDRESS, WORD, WORD, ADDRESS]}


class Stream:
    """Positions as the bytes of a storage."""

    def __init__(self, storage: str) -> None:
        module, functions = ir.Module(storage), {}
        helpers = Helpers(module)
        for name in KINDS:
            function = getattr(STREAMS[storage], name)(helpers)
            function.linkage = ""  # no longer of this module alone
            functions[name] = function.name
        image = jit.machine().emit_object(jit.optimized(str(module)))
        builder = jit.llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
        for name in functions.values():
            builder.export_symbol(name)
        self.linked = builder.link(jit.linker(), f"test_{storage}")
        self.functions = {
            name: ctypes.CFUNCTYPE(WORD, *KINDS[name])(self.linked[symbol])
            for name, symbol in functions.items()
        }

    def store(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        """Write positions below n; how many bytes they take."""
        given = np.array([-1, *positions], np.int32)
        start = out.ctypes.data
        return self.functions["store"](given.ctypes.data + 4, len(positions), n, start) - start

    def load(self, data: np.ndarray, count: int, n: int) -> list[int] | None:
        """`count` positions below n; None where the bytes are something else."""
        held = np.array([*data, 0], np.uint8)
        found, start = np.zeros(count + SLACK, np.int32), held.ctypes.data
        good = self.functions["load"](start, start + len(data), count, n, found.ctypes.data)
        return found[:count].tolist() if good else None


@cache
def stream(storage: str) -> Stream:
    """The functions of a storage, compiled once."""
    return Stream(storage)
