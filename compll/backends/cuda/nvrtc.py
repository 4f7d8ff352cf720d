"""Compilation of CUDA C++ to machine code by NVRTC, which needs no device.

CuPy's own compilation is not used: it adds `-ftz=true`, which turns denormal floats into zeros, so
that payloads would differ from those of the other backends.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from compll.runtime.cache import alone, folder, whole, write_whole

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true",
           "-default-device")  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel: registers of a thread, bytes of local memory of a thread (for values
    that do not fit registers), bytes of shared memory of a block."""

    registers: int
    local: int
    shared: int


def resources(log: str) -> dict[str, Resources]:
    """Resources of every kernel, by its name, from ptxas's output with `-v`."""
    result, name, local = dict[str, Resources](), "", 0
    for line in log.splitlines():
        if entry := re.search(r"entry function '(\w+)'", line):
            name = entry[1]
        elif stack := re.search(r"(\d+) bytes stack frame", line):
            local = int(stack[1])
        elif used := re.search(r"Used (\d+) registers(.*)", line):
            shared = re.search(r"(\d+) bytes smem", used[2])
            result[name] = Resources(int(used[1]), local, int(shared[1]) if shared else 0)
    return result


def compiled(text: str, arch: str, *options: str) -> tuple[bytes, dict[str, Resources]]:
    """Code for one architecture: a cubin for "sm_90", PTX for "compute_90"; and resources of each
    kernel of a cubin. Raises RuntimeError for a source that NVRTC refuses."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, "compll.cu", (), ())
    flags = (f"--gpu-architecture={arch}", *OPTIONS, "--ptxas-options=-v", *options)
    try:
        nvrtc.compileProgram(program, flags)
        if arch.startswith("compute"):
            return bytes(nvrtc.getPTX(program)), {}
        return complete(nvrtc.getCUBIN(program)), resources(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as why:
        raise RuntimeError(f"NVRTC: {nvrtc.getProgramLog(program)}") from why
    finally:
        nvrtc.destroyProgram(program)


def complete(elf: bytes) -> bytes:
    """A cubin with its last byte, which CuPy drops as the end of a text; tools refuse a cubin
    without it.

    The byte belongs to the program headers, which come last. It is zero, as is the upper half of an
    alignment.
    """
    (begin,), (size, count) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    return elf.ljust(begin + size * count, b"\0")


def cubin(text: str, arch: str, *options: str) -> bytes:
    """The machine code of `compiled` alone."""
    return compiled(text, arch, *options)[0]


def architecture(capability: str) -> str:
    """The target for a device of a compute capability ("90"): machine code, or PTX, which the
    driver compiles, if NVRTC does not know the device yet."""
    from cupy.cuda import nvrtc

    supported = nvrtc.getSupportedArchs()
    if int(capability) in supported:
        return f"sm_{capability}"
    older = [arch for arch in supported if arch <= int(capability)]
    if not older:
        raise RuntimeError(f"NVRTC knows no device of compute capability {capability}: {supported}")
    return f"compute_{max(older)}"


def kept(text: str, capability: str) -> Path:
    """The file of a source compiled for devices of a compute capability; made once, for all
    processes. Raises RuntimeError."""
    from cupy.cuda import nvrtc

    arch = architecture(capability)
    parts = [text, arch, *OPTIONS, str(nvrtc.getVersion())]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = folder("cuda") / f"{digest}.{'cubin' if arch.startswith('sm') else 'ptx'}"
    if not whole(path):
        with alone(path):
            if not whole(path):
                write_whole(path, cubin(text, arch))
    return path
