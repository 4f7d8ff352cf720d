"""The CPU backend: serial kernels that release the GIL, compiled once and then cached on disk.

Parallelism comes from the caller's own threads, a batch each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from compll.backends.cpu.tiles import TileKernels
from compll.ir.module import Module
from compll.ir.program import Unsupported
from compll.ir.static import Number
from compll.ir.tile import NotLowered

if TYPE_CHECKING:
    from compll.backends.cpu.numba_kernels import Kernels
    from compll.backends.reference.array_kernels import ArrayKernels


def build(module: Module, params: Mapping[str, Number]) -> TileKernels | Kernels | ArrayKernels:
    """The backend's entry point."""
    if module.arrays:
        from compll.backends.cpu import array_kernels  # few specs need it

        return array_kernels.build(module, params)
    try:
        return TileKernels(module, params)
    except (NotLowered, Unsupported):
        from compll.backends.cpu import numba_kernels  # its modules take as long as a warm start

        return numba_kernels.build(module, params)
