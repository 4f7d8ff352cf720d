"""Memory of bench.gpu_check: that of the current GPU, or the host's for the tests' shim."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import compll
from compll.backends.cuda import backend, source
from compll.runtime import library

_KINDS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_COMPILING = threading.Lock()


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values rounded to nearest even in a dtype, in float32."""
    if dtype == "float32":
        return values
    floats: NDArray[Any] = torch.from_numpy(values).to(_KINDS[dtype]).float().numpy()
    return floats


@dataclass(frozen=True)
class Place:
    """Memory of codecs' arrays. gpu: that of the current device, as CuPy's arrays."""

    gpu: bool

    def put(self, values: NDArray[Any]) -> Any:
        """A copy in this memory."""
        if not self.gpu:
            return values.copy()
        import cupy

        return cupy.asarray(values)

    def zeros(self, count: int) -> Any:
        """An array of zero bytes."""
        return self.put(np.zeros(count, np.uint8))

    def host(self, array: Any) -> NDArray[Any]:
        """A copy in host memory; waits."""
        copy: NDArray[Any] = array.get() if self.gpu else np.array(array)
        return copy

    def gradient(self, values: NDArray[Any], dtype: str) -> Any:
        """Float32 values that this dtype can hold, as an array of it; for bfloat16 their bits."""
        if dtype == "bfloat16":
            halves = torch.from_numpy(values).to(torch.bfloat16)
            return self.put(halves.view(torch.int16).numpy().view(np.uint16))
        return self.put(values.astype(dtype))

    def values(self, array: Any, dtype: str) -> NDArray[Any]:
        """Values of a gradient, in float32."""
        bits = self.host(array)
        if dtype == "bfloat16":
            bits = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
        return bits.astype(np.float32)


def on_cuda(spec: str) -> tuple[compll.Codec, Place]:
    """A codec of the current device, and its memory."""
    with _COMPILING:
        return compll.compile(spec, "cuda"), Place(gpu=True)


def on_shim(spec: str) -> tuple[compll.Codec, Place]:
    """The same kernels, run by the tests' shim, and the host's memory."""
    shim = import_module("tests.compll.cuda_host")
    module, params = library.type_check(spec, {})
    kernels: Any = backend.Kernels(module, params, shim.HostDevice, source.source(module, 64))
    kernels.arrays = shim.Arrays()
    text = library.locate(spec).read_text()
    return compll.Codec(module, params, "cuda", text, kernels), Place(gpu=False)
