"""LLVM IR as functions that ctypes calls: compiled once, then loaded as objects from the cache."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from compll.errors import UsageError
from compll.runtime.cache import (
    IMPORTED,
    alone,
    folder,
    read,
    sources,
    spare,
    usual,
    write,
)

# ---- processor ----------------------------------------------------------------------------------
# The processor that kernels are compiled for: this one, or the one that COMPLL_CPU names.
# x86-64-v3 has AVX2 and no AVX-512; x86-64-v2 has SSE only. So code for other processors can be
# tested here.

#: lesser processors by LLVM's names, with the features that code here asks about
LESSER: dict[str, dict[str, bool]] = {
    "x86-64-v3": {"f16c": True, "avx512f": False},
    "x86-64-v2": {"f16c": False, "avx512f": False},
}
NAME: str = os.environ.get("COMPLL_CPU") or llvm.get_host_cpu_name()
#: LLVM's features, each with true if the processor has it
FEATURES: Mapping[str, bool] = LESSER.get(NAME, llvm.get_host_cpu_features())


def features() -> str:
    """Features beyond those that the name implies, in LLVM's notation. Raises UsageError."""
    if NAME in LESSER:
        return ""
    if llvm.get_host_cpu_name() != NAME:
        raise UsageError(f"COMPLL_CPU is {NAME!r}, not {' or '.join(LESSER)}")
    result: str = llvm.get_host_cpu_features().flatten()
    return result


# ---- jit ----------------------------------------------------------------------------------------

log = logging.getLogger("compll")
_numbers = itertools.count()


@cache
def machine() -> Any:
    """The target machine of LLVM, for this processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(NAME, features(), opt=3, reloc="pic")


@cache
def version() -> str:
    """A text that changes with the compiler, LLVM and the processor; objects depend on it."""
    facts = (llvmlite.__version__, NAME, features(), IMPORTED)
    return " ".join(facts)


def optimized(text: str, level: int = 3) -> Any:
    """An LLVM module, optimized for this processor; level 1 leaves loops as they are."""
    module = llvm.parse_assembly(text)
    tuning = llvm.create_pipeline_tuning_options(speed_level=level)
    tuning.loop_unrolling = level > 1
    tuning.loop_vectorization = tuning.slp_vectorization = False  # the IR has vectors already
    builder = llvm.create_pass_builder(machine(), tuning)
    builder.getModulePassManager().run(module, builder)
    return module


def assembly(text: str) -> str:
    """This processor's assembly of LLVM IR, to read."""
    return str(machine().emit_assembly(optimized(text)))


def stored(name: str, program: str, text: Callable[[], str], level: int = 3) -> bytes:
    """The object of a tile program, from the cache or compiled from the LLVM IR that `text`
    gives."""
    digest = hashlib.sha256(f"{program}{version()}".encode()).hexdigest()[:20]
    file = f"{name}_{digest}.o"
    with suppress(OSError):
        return _checked(read(usual("cpu") / file))
    if sources() != IMPORTED:
        log.warning("compll was changed on disk: kernels of %s are compiled for this process", name)
        return bytes(machine().emit_object(optimized(text(), level)))
    path = folder("cpu") / file
    log.info("compiling kernels of %s, which are then cached", name)
    with alone(path):
        with suppress(OSError):
            return _checked(read(path))
        made: bytes = machine().emit_object(optimized(text(), level))
        data = hashlib.sha256(made).digest() + made
        try:
            write(path, data)
        except OSError:
            with suppress(OSError):
                write(spare("cpu") / file, data)
        return made


def _checked(data: bytes) -> bytes:
    """The object in a file. Raises OSError for a damaged file; then it is compiled again."""
    made = data[32:]
    if hashlib.sha256(made).digest() != data[:32]:
        raise OSError("a damaged object")
    return made


class Library:
    """Functions of an object. A call takes addresses and numbers, and releases the GIL."""

    def __init__(self, image: bytes, signatures: dict[str, Sequence[Any]]) -> None:
        builder = llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
        for name in signatures:
            builder.export_symbol(name)
        self._linker = linker()
        self._linked = builder.link(self._linker, f"compll{next(_numbers)}")
        self.functions = {
            name: ctypes.CFUNCTYPE(None, *kinds)(self._linked[name])
            for name, kinds in signatures.items()
        }


@cache
def linker() -> Any:
    """LLVM's just-in-time linker."""
    return llvm.create_lljit_compiler(machine())
