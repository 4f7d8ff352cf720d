"""The processor that kernels are compiled for: this one, or what COMPLL_CPU names.

x86-64-v3 has AVX2 and no AVX-512, x86-64-v2 has SSE alone: so what others compute can be tested here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import llvmlite.binding as llvm

from compll.errors import UsageError

#: by LLVM's names, the features of theirs that are asked for
LESSER: dict[str, dict[str, bool]] = {
    "x86-64-v3": {"f16c": True, "avx512f": False},
    "x86-64-v2": {"f16c": False, "avx512f": False},
}
NAME: str = os.environ.get("COMPLL_CPU") or llvm.get_host_cpu_name()
#: whether it has each of LLVM's features, as far as they are known
FEATURES: Mapping[str, bool] = LESSER.get(NAME, llvm.get_host_cpu_features())


def features() -> str:
    """As LLVM takes them, beside those that the name stands for. Raises UsageError."""
    if NAME in LESSER:
        return ""
    if llvm.get_host_cpu_name() != NAME:
        raise UsageError(f"COMPLL_CPU is {NAME!r}, not {' or '.join(LESSER)}")
    found: str = llvm.get_host_cpu_features().flatten()
    return found
