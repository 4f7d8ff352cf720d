"""Generated CUDA kernels on the CPU: compiled by g++ with shim.h, driven through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

import numpy as np

from compll.backends.cuda import backend as cuda
from compll.backends.cuda import source as cuda_source
from compll.backends.cuda.plans import Place, within
from compll.backends.cuda.source import Source
from compll.runtime.arrays import HostArrays
from compll.runtime.cache import folder, write
from compll.runtime.codec import Codec
from compll.runtime.library import type_check

HERE = Path(__file__).parent
FLAGS = ["-std=c++17", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC",
         "-w"]  # fmt: skip
ORDER = 'extern "C" void set_order(int descending) { shim::descending = descending; }\n'
#: accesses outside of buffers, and operations with another result, or a fault, on a device
SANITIZE = ["-fsanitize=address,alignment,bounds,shift,float-cast-overflow,integer-divide-by-zero",
            "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]  # fmt: skip
C_TYPES = {
    "int": ctypes.c_int,
    "i64": ctypes.c_longlong,
    "u64": ctypes.c_ulonglong,
    "float": ctypes.c_float,
}


def build(text: str, *, sanitize: bool = False) -> Path:
    """The shared library of a source text, compiled once per text."""
    flags = FLAGS + (SANITIZE if sanitize else [])
    shim = (HERE / "shim.h").read_text()
    digest = hashlib.sha256("\0".join([shim, text, *flags]).encode()).hexdigest()[:20]
    path = folder("cuda_host") / f"{digest}.so"
    if not path.exists():
        source = path.with_suffix(f".{os.getpid()}.cpp")
        source.write_text(text)
        made = path.with_suffix(f".{os.getpid()}.so")
        header = precompiled(shim, flags)
        compiled(["g++", *flags, "-include", str(header), str(source), "-o", str(made)])
        made.replace(path)
        source.unlink()
    return path


def precompiled(shim: str, flags: list[str]) -> Path:
    """shim.h, with a precompiled header beside it that g++ finds: the larger part of the time."""
    digest = hashlib.sha256("\0".join([shim, *flags]).encode()).hexdigest()[:20]
    header = folder("cuda_host") / digest / "shim.h"
    ready = header.with_name("shim.h.gch")
    if not ready.exists():
        header.parent.mkdir(exist_ok=True)
        write(header, shim)
        made = header.with_name(f"{os.getpid()}.gch")
        compiled(["g++", *flags, "-x", "c++-header", str(header), "-o", str(made)])
        made.replace(ready)
    return header


def compiled(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stderr[:4000])


def entry(kernel: str, params: tuple[str, ...]) -> str:
    """A C function that runs a kernel on a grid; one lambda per kernel would double g++'s time."""
    names = [p.split()[-1].lstrip("*") for p in params]
    members = " ".join(f"{p};" for p in params)
    held = ", ".join(f"a->{name}" for name in names)
    return (
        f"struct Given_{kernel} {{ {members} }};\n"
        f"static void call_{kernel}(void* given_) {{ auto a = (Given_{kernel}*)given_; "
        f"{kernel}({held}); }}\n"
        f'extern "C" void run_{kernel}(int grid_, int threads_, {", ".join(params)}) '
        f"{{ Given_{kernel} given_{{{', '.join(names)}}}; "
        f"shim::launch(grid_, threads_, call_{kernel}, &given_); }}\n"
    )


class HostDevice:
    """A device for cuda.Kernels, on NumPy arrays and the shim."""

    def __init__(self, source: Source, *, sanitize: bool = False, descending: bool = False) -> None:
        self.source, self.sanitize, self.descending = source, sanitize, descending
        self.params = {s.kernel: plan.params for plan in source.plans.values() for s in plan.steps}
        self.launches: list[str] = []
        self.libraries: dict[str, ctypes.CDLL] = {}

    def library(self, gradient: str) -> ctypes.CDLL:
        if gradient not in self.libraries:
            entries = ORDER + "".join(entry(k, p) for k, p in self.params.items())
            path = build(self.source.full(gradient) + entries, sanitize=self.sanitize)
            self.libraries[gradient] = ctypes.CDLL(str(path))
        return self.libraries[gradient]

    def upload(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values).copy()

    def zeros(self, count: int, dtype: str) -> np.ndarray:
        return np.zeros(count, dtype)

    def part(self, zone: np.ndarray, place: Place) -> np.ndarray:
        """An array within bytes, or apart from others: a sanitizer sees the end of each."""
        array = within(zone, place)
        return array.copy() if self.sanitize else array

    def capturing(self) -> bool:
        """False: graphs cannot be captured here."""
        return False

    def stream(self) -> int:
        """The only stream."""
        return 0

    def settle(self) -> None:
        """Does nothing: launches are synchronous."""

    def finish(self) -> None:
        """Does nothing, as settle."""

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def dtype(self, array: np.ndarray) -> str:
        return {"uint16": "bfloat16"}.get(array.dtype.name, array.dtype.name)

    def launch(
        self, gradient: str, kernel: str, grid: int, threads: int, args: tuple[object, ...]
    ) -> None:
        self.launches.append(kernel)
        library = self.library(gradient)
        library.set_order(int(self.descending))
        function = getattr(library, f"run_{kernel}")
        function.argtypes = [ctypes.c_int, ctypes.c_int, *map(c_type, self.params[kernel])]
        function(grid, threads, *map(plain, args))


def c_type(param: str) -> type:
    return ctypes.c_void_p if "*" in param else C_TYPES[param.split()[0]]


def plain(arg: object) -> object:
    return arg.ctypes.data if isinstance(arg, np.ndarray) else arg and arg.item()


class Arrays(HostArrays):
    """NumPy arrays, presented as a device's."""

    host = False

    def vector(self, x, name, *, write=False):
        return x


def kernels(spec, device=HostDevice, **params) -> cuda.Kernels:
    """A spec's kernels on a device; blocks have 64 threads."""
    module, known = type_check(spec, params)
    return cuda.Kernels(module, known, device, cuda_source.source(module, 64))


def codec(spec, device=HostDevice, *, arrays=Arrays, **params) -> Codec:
    """A codec of these kernels. arrays: None for those of CuPy."""
    made = kernels(spec, device, **params)
    if arrays is not None:
        made.arrays = arrays()
    return Codec(made.module, made.params, "cuda", str(spec), made)
