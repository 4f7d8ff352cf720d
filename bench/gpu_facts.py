"""Facts of a machine with a GPU: its hardware, its memory's speed, and if a codec runs at all.

    python -m bench.gpu_facts [--rehearse] [--output FOLDER]

Results: gpu_facts.json. --rehearse: without a GPU, with the tests' shim for the kernels.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer

import compll
from bench.commands import RESULTS, command_line, now, refusing
from bench.gpu_memory import on_cuda, on_shim
from bench.gpu_times import require_gpu, timed
from hipress.tools.refusals import check_output

PACKAGES = ("torch", "numpy", "llvmlite", "cupy-cuda12x", "cupy-cuda13x", "nccl4py", "transformers")
MEGABYTES = 256  # of the copy


def version(package: str) -> str | None:
    """An installed package's version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_facts() -> dict[str, Any]:
    """The GPU, and GB/s of a copy, read and written."""
    source = torch.ones(MEGABYTES << 18, device="cuda")
    target = torch.zeros_like(source)
    took = timed({"copy": lambda: target.copy_(source)}, 21)["copy"]
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": torch.cuda.get_device_name(), "gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count, "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "copy_GBps": round(8 * len(source) / took.ms / 1e6, 1),
    }  # fmt: skip


def one_encode(rehearse: bool) -> dict[str, Any]:
    """The first call, with all that it compiles, and a check of its bytes against the CPU's."""
    codec, place = (on_shim if rehearse else on_cuda)("int4_group")
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    table, at = np.array([[0, len(x), 0, 0, 0]]), np.zeros(1, np.int64)
    out, want = place.zeros(codec.payload_bytes(len(x))), np.zeros(0, np.uint8)
    begin = perf_counter()
    codec.encode_batch(place.put(x), table, out, at, seed=1)
    payload, seconds = place.host(out), perf_counter() - begin
    want = np.zeros_like(payload)
    compll.compile("int4_group").encode_batch(x, table, want, at, seed=1)
    return {"first_encode_s": round(seconds, 3), "bits_of_the_cpu": bool((payload == want).all())}


def main(
    rehearse: Annotated[bool, typer.Option("--rehearse", help="run without a GPU")] = False,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """Write gpu_facts.json."""
    with refusing():
        check_output(output)
        if not rehearse:
            require_gpu()
    facts: dict[str, Any] = {"date": now(), "command": command_line("bench.gpu_facts")}
    facts["python"] = platform.python_version()
    facts |= {name: installed for name in PACKAGES if (installed := version(name))}
    facts |= one_encode(rehearse) | ({} if rehearse else device_facts())
    (output / "gpu_facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    shown = ("device", "cuda", "nccl", "copy_GBps", "first_encode_s", "bits_of_the_cpu")
    print(", ".join(f"{name} {facts[name]}" for name in shown if name in facts))
    raise typer.Exit(int(not facts["bits_of_the_cpu"]))


if __name__ == "__main__":
    typer.run(main)
