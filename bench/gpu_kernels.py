"""Compile CUDA kernels of compressors into the cache, in several processes, without a device.

    python -m bench.gpu_kernels [NAMES...] [--dtypes float32] [--capability 90] [--processes 14]

NVRTC takes seconds for a compressor, on one core.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import product
from time import perf_counter
from typing import Annotated

import typer

import compll
from bench.commands import check_codecs, refusing
from compll.backends.cuda.nvrtc import kept
from compll.backends.cuda.source import hop_source, source
from compll.runtime import library


def compile_one(name: str, dtype: str, capability: str) -> str:
    """A line on the kernels of a compressor, and of its hop if that is one call."""
    begin = perf_counter()
    module, _ = library.type_check(name, {})
    code = source(module)
    kept(code.full(dtype), capability)
    if code.hops:  # not all are encoded again on their way
        kept(hop_source(code).full(dtype), capability)
    return f"{name}, {dtype}: {perf_counter() - begin:.1f} s"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="compressors; all by default")] = None,
    dtypes: Annotated[str, typer.Option(help="dtypes of gradients")] = "float32",
    capability: Annotated[str, typer.Option(help="of the device, such as 90")] = "90",
    processes: Annotated[int, typer.Option(min=1)] = 14,
) -> None:
    """Compile kernels, and tell how long each took."""
    with refusing():
        check_codecs(names or ())
    jobs = [*product(names or compll.list_specs(), dtypes.split(","))]
    with ProcessPoolExecutor(processes) as pool:
        for line in pool.map(compile_one, *zip(*jobs, strict=True), [capability] * len(jobs)):
            print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
