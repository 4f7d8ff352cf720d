"""The processor that kernels are compiled for: this one, or the one that COMPLL_CPU names.

x86-64-v3 has AVX2 and no AVX-512; x86-64-v2 has SSE only. So code for other processors can be
tested here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import llvmlite.binding as llvm

from compll.errors import UsageError

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
    found: str = llvm.get_host_cpu_features().flatten()
    return found
