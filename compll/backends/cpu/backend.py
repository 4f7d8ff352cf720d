"""The CPU backend: serial kernels that release the GIL, compiled once and then cached on disk.

Parallelism comes from the caller's own threads, a batch each.
"""

from __future__ import annotations

from collections.abc import Mapping

from compll.backends.cpu.batch import TileKernels
from compll.ir.module import Module
from compll.ir.static import Number
from compll.passes import lower


def build(module: Module, params: Mapping[str, Number]) -> TileKernels:
    """The backend's entry point. Raises SpecError for a spec that it does not compile."""
    return TileKernels(module, params)


def source(module: Module) -> str:
    """The LLVM IR of all of a spec's kernels. Raises SpecError."""
    from compll.backends.cpu.printer import (
        module_text,
    )  # slower to import than an object is to load

    parts = lower.kernels(module).values()
    return module_text(module.name, [kernel for part in parts for kernel in part])
