"""CUDA C++ to machine code by NVRTC, which needs no device.

CuPy's own way from source to module is not taken: it adds `-ftz=true`, which makes zeros of
denormal floats, so that payloads would not be those of the other backends.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from compll.runtime.cache import alone, folder, own, write

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true",
           "-default-device")  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread, bytes of local memory of a thread (what registers
    could not hold), bytes of shared memory of a block."""

    registers: int
    local: int
    shared: int


def resources(log: str) -> dict[str, Resources]:
    """Of every kernel, by its name, from what ptxas says with `-v`."""
    found, name, local = dict[str, Resources](), "", 0
    for line in log.splitlines():
        if entry := re.search(r"entry function '(\w+)'", line):
            name = entry[1]
        elif stack := re.search(r"(\d+) bytes stack frame", line):
            local = int(stack[1])
        elif used := re.search(r"Used (\d+) registers(.*)", line):
            shared = re.search(r"(\d+) bytes smem", used[2])
            found[name] = Resources(int(used[1]), local, int(shared[1]) if shared else 0)
    return found


def compiled(text: str, arch: str, *options: str) -> tuple[bytes, dict[str, Resources]]:
    """Compile for one architecture: a cubin for "sm_90", PTX for "compute_90"; and what each kernel
    of a cubin takes. Raises RuntimeError for a source that NVRTC refuses."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, "compll.cu", (), ())
    told = (f"--gpu-architecture={arch}", *OPTIONS, "--ptxas-options=-v", *options)
    try:
        nvrtc.compileProgram(program, told)
        if arch.startswith("compute"):
            return bytes(nvrtc.getPTX(program)), {}
        return complete(nvrtc.getCUBIN(program)), resources(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as why:
        raise RuntimeError(f"NVRTC: {nvrtc.getProgramLog(program)}") from why
    finally:
        nvrtc.destroyProgram(program)


def complete(elf: bytes) -> bytes:
    """A cubin with its last byte, which CuPy takes for the end of a text: tools refuse it without.

    It is of the program headers, which stand last, and zero as the upper half of an alignment is.
    """
    (begin,), (size, count) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    return elf.ljust(begin + size * count, b"\0")


def cubin(text: str, arch: str, *options: str) -> bytes:
    """The machine code of `compiled` alone."""
    return compiled(text, arch, *options)[0]


def architecture(capability: str) -> str:
    """What to compile for, for a device of a compute capability ("90"): machine code, or what the
    driver makes machine code of where NVRTC does not know the device yet."""
    from cupy.cuda import nvrtc

    known = nvrtc.getSupportedArchs()
    if int(capability) in known:
        return f"sm_{capability}"
    older = [arch for arch in known if arch <= int(capability)]
    if not older:
        raise RuntimeError(f"NVRTC knows no device of compute capability {capability}: {known}")
    return f"compute_{max(older)}"


def kept(text: str, capability: str) -> Path:
    """The file of a source compiled for devices of a compute capability; made once, for all
    processes. Raises RuntimeError."""
    from cupy.cuda import nvrtc

    arch = architecture(capability)
    parts = [text, arch, *OPTIONS, str(nvrtc.getVersion())]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = folder("cuda") / f"{digest}.{'cubin' if arch.startswith('sm') else 'ptx'}"
    if not own(path):
        with alone(path):
            if not own(path):
                write(path, cubin(text, arch))
    return path
