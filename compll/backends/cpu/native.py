"""CPU kernels without numba's run time: object files of a module, linked and called directly.

Importing numba takes longer than all else that a warm start does. So what is compiled with it is
kept as plain native code beside its source (see cpu/object.py); here LLVM's linker loads that, and
ctypes, which releases the GIL, calls it.

A file is one line of JSON, then the objects. It is taken only if all of the line holds here and
now; anything else is a miss, and the kernels are made by numba as if there were no such file.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import platform
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

#: what an entry returns besides a kernel's result: it is not for such arguments; memory ran out
REFUSED, FAILED = -(2**63), -(2**63) + 1
#: of PyArrayObject, which is fixed in NumPy's ABI, and of PyObject
TYPE, DATA, NDIM, SHAPE, DESCR, FLAGS = 8, 16, 24, 32, 56, 64
#: of PyArray_Descr: the letters of its kind, its type and its byte order
LETTERS = 24
#: C order, aligned, writeable
NEEDED = 0x501
SCALARS: dict[str, Any] = {
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "bool": ctypes.c_bool,
}
#: numba's settings by which its kernels raise errors of their own, or are not compiled
OTHERWISE = {"NUMBA_BOUNDSCHECK", "NUMBA_DISABLE_JIT"}
_lock = threading.Lock()
_numbers = itertools.count()


class Stored(NamedTuple):
    """A file's content.

    kernels: by name, for each signature the kinds of its arguments ("float32", an array
    "float32[2]"); none where numba's code could not be used. images: object files, which do not
    need one another.
    """

    kernels: dict[str, list[list[str]]]
    images: tuple[bytes, ...]


def letters(dtype: np.dtype[Any]) -> int:
    """What a descriptor of this dtype holds at LETTERS."""
    return int.from_bytes(f"{dtype.kind}{dtype.char}{dtype.byteorder}".encode(), "little")


@cache
def here() -> dict[str, str]:
    """What an object file depends on besides its source, which its name tells."""
    changed = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("NUMBA_"))
    return {
        "llvmlite": llvmlite.__version__,
        "python": f"{platform.python_implementation()} {sys.version}",
        "numpy": np.__version__,
        "machine": f"{sys.platform} {llvm.get_process_triple()}",
        "cpu": llvm.get_host_cpu_name(),
        "features": llvm.get_host_cpu_features().flatten(),
        "settings": " ".join(changed),
    }


@cache
def tag() -> str:
    """What the names of files tell, for machines that share a folder."""
    return hashlib.sha256(json.dumps(here()).encode()).hexdigest()[:8]


@cache
def possible() -> bool:
    """Whether this machine is of the kind that was tried, and arrays lie in memory as expected."""
    if os.environ.get("COMPLL_NATIVE") == "0":  # the user's way out
        return False
    tried = (sys.platform, platform.machine(), sys.implementation.name)
    if tried != ("linux", "x86_64", "cpython") or OTHERWISE & os.environ.keys():
        return False
    # Builds without the GIL, or for debugging, have a longer PyObject.
    return object.__basicsize__ == 16 and as_expected(np.ones((2, 3), np.float32))


def as_expected(array: F32) -> bool:
    """Whether a C-contiguous float32 array of two dimensions reads as NumPy says."""

    def word(base: int, offset: int, kind: Any = ctypes.c_int64) -> int:
        return int(kind.from_address(base + offset).value)

    at, descr = id(array), id(array.dtype)
    return (
        (word(at, TYPE), word(at, DATA)) == (id(np.ndarray), array.ctypes.data)
        and word(at, NDIM, ctypes.c_int32) == 2
        and tuple(word(word(at, SHAPE), 8 * i) for i in range(2)) == array.shape
        and word(at, DESCR) == descr
        and word(descr, LETTERS, ctypes.c_uint32) & 0xFFFFFF == letters(array.dtype)
        and word(at, FLAGS, ctypes.c_int32) & NEEDED == NEEDED
    )


def digest(stored: Stored) -> str:
    """By which a damaged file is known."""
    return hashlib.sha256(
        b"".join((json.dumps(stored.kernels).encode(), *stored.images))
    ).hexdigest()


def packed(stored: Stored) -> bytes:
    """The bytes of a file."""
    sizes = [len(image) for image in stored.images]
    line = {"here": here(), "digest": digest(stored), "sizes": sizes, "kernels": stored.kernels}
    return b"".join((json.dumps(line).encode(), b"\n", *stored.images))


def unpacked(data: bytes) -> Stored | None:
    """What the bytes of a file hold; None if that is nothing for this process."""
    try:
        line, _, rest = data.partition(b"\n")
        found = json.loads(line)
        ends = list(itertools.accumulate(found["sizes"], initial=0))
        stored = Stored(found["kernels"], tuple(rest[a:b] for a, b in itertools.pairwise(ends)))
        whole = (found["here"], found["digest"], len(rest)) == (here(), digest(stored), ends[-1])
        return stored if whole else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def read(path: Path) -> Stored | None:
    """What a file holds; None if there is none, or none for this process."""
    try:
        return unpacked(path.read_bytes())
    except OSError:
        return None


@cache
def linker() -> Any:
    """LLVM's, made when first needed."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(suppress_errors=True)


def link(stored: Stored, compiled: Callable[[str], Any]) -> Any:
    """The kernels as attributes. compiled: what gives one, by its name, as numba's.

    Raises RuntimeError when there are none, or a symbol is missing.
    """
    if not stored.kernels:
        raise RuntimeError("no object")
    builder = llvm.JITLibraryBuilder().add_current_process()
    for image in stored.images:
        builder.add_object_img(image)
    builder.import_symbol("compll_ndarray", id(np.ndarray))
    for name, signatures in stored.kernels.items():
        for number in range(len(signatures)):
            builder.export_symbol(symbol(name, number))
    with _lock:
        linked = builder.link(linker(), f"compll{next(_numbers)}")
    found = SimpleNamespace()
    for name, signatures in stored.kernels.items():
        entries = [entry(linked[symbol(name, i)], kinds) for i, kinds in enumerate(signatures)]
        setattr(found, name, kernel(name, entries, compiled))
    linked.detach()  # so that the code stays to the end of the process
    return found


def symbol(name: str, number: int) -> str:
    """That of the entry for a signature of a kernel."""
    return f"compll_{name}_{number}"


def entry(address: int, kinds: list[str]) -> Callable[..., int]:
    """An entry as a function."""
    types: list[Any] = [ctypes.py_object if "[" in kind else SCALARS[kind] for kind in kinds]
    return ctypes.CFUNCTYPE(ctypes.c_int64, *types)(address)


def kernel(
    name: str, entries: list[Callable[..., int]], compiled: Callable[[str], Any]
) -> Callable[..., int]:
    """A kernel as a function; arguments that no signature takes are left to numba's."""

    def call(*args: Any) -> int:
        for entry in entries:
            try:
                found = entry(*args)
            except (ctypes.ArgumentError, TypeError):
                break
            if found > FAILED:
                return found
            if found == FAILED:
                raise MemoryError(f"{name}: no memory for scratch")
        return compiled(name)(*args)  # type: ignore[no-any-return]

    return call
