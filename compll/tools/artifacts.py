"""Files that `compll build` writes for a target: generated source and, for CUDA, compiled kernels.

A target that generates code has a row in `_SOURCES`; other targets interpret the typed tree.
Nothing here needs the target's device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from compll.errors import UsageError
from compll.ir.module import Module
from compll.ir.static import Number

Texts = dict[str, str]
#: registers, local and shared memory, by the gradient's dtype and the kernel's name
Kernels = dict[str, dict[str, dict[str, int]]]
#: targets whose codecs need a device; their source does not
DEVICES = ("cuda",)


def sources(target: str, module: Module, params: Mapping[str, Number]) -> Texts:
    """Generated source, by the ending of its file. Raises SpecError."""
    maker = _SOURCES.get(target)
    return maker(module, params) if maker else {}


@dataclass(frozen=True)
class Binaries:
    """Compiled kernels: files by their endings, and resources of each kernel of each source."""

    files: dict[str, bytes]
    kernels: Kernels


def binaries(target: str, texts: Texts, arch: str) -> Binaries:
    """The sources compiled for one GPU architecture ("sm_90"). Raises UsageError."""
    if target != "cuda":
        raise UsageError(f"--arch belongs to --target cuda, not {target}")
    from compll.backends.cuda.nvrtc import compiled

    try:
        by_name = {name.removesuffix(".cu"): compiled(text, arch) for name, text in texts.items()}
    except ImportError as why:
        raise UsageError(f"--arch needs CuPy with NVRTC: {why}") from why
    except RuntimeError as why:
        raise UsageError(f"{arch}: {why}") from why
    return Binaries(
        {f"{name}.{arch}.cubin": data for name, (data, _) in by_name.items()},
        {name: {k: asdict(r) for k, r in used.items()} for name, (_, used) in by_name.items()},
    )


def assembly(target: str, texts: Texts) -> Texts:
    """Readable forms of the sources for this processor, by the endings of their files."""
    if target != "cpu":
        return {}
    from compll.backends.cpu import jit

    return {ending.replace(".ll", ".s"): jit.assembly(text) for ending, text in texts.items()}


def _cpu(module: Module, params: Mapping[str, Number]) -> Texts:
    from compll.backends.cpu import backend

    return {"cpu.ll": backend.source(module)}


def _cuda(module: Module, params: Mapping[str, Number]) -> Texts:
    from compll.backends.cuda.source import sources

    return {f"{gradient}.cu": text for gradient, text in sources(module, params).items()}


_SOURCES: dict[str, Callable[[Module, Mapping[str, Number]], Texts]] = {"cpu": _cpu, "cuda": _cuda}
