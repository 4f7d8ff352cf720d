"""GB/s of gradient that every codec encodes and decodes on a GPU, against its measured copy
bandwidth and, for dgc, against an encoder built on torch.topk; all in turn in one run.

    python -m bench.gpu [NAMES...] [--sizes 1,16,256,1024] [--repeat 21]

Needs CuPy, a CUDA build of torch, and a device.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import compll
from bench.plain_torch import METHODS
from compll.array_traffic import traffic_of
from compll.errors import CompllError
from hipress.demo import methods

RESULTS = Path(__file__).parent / "results"
TORCH_BASELINES = ("dgc", "topk")  # what of plain_torch is built on torch.topk
Job = Callable[[], object]


def jobs(name: str, n: int) -> dict[str, tuple[Job, float]]:
    """What is timed for one codec over n float32 elements, and the bytes per element it moves."""
    method = methods.parse(f"hipress:{name}")
    codec = compll.compile(str(method.codec), "cuda", **method.options)
    x = 0.01 * torch.randn(n, device="cuda")
    view, y = codec.arrays.vector(x, name), codec.arrays.zeros(n, "float32")
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out, spare = (codec.arrays.zeros(codec.payload_bytes(n), "uint8") for _ in range(2))
    state = codec.init_state(n) if codec.stateful else None
    moved = traffic_of(codec.module, feed=state is not None).moved
    used = codec.encode_batch(view, table, out, at).copy()
    share = float(used[0]) / n
    found: dict[str, tuple[Job, float]] = {
        "encode": (lambda: codec.encode_batch(view, table, spare, at, state=state), moved),
        "decode_add": (
            lambda: codec.decode_batch(out, table, at, used, y, add=True),
            share * 5 if codec.module.selections else 8 + share,
        ),
    }
    found |= round_jobs(codec, view, state)
    if name in TORCH_BASELINES:
        kept = torch.zeros(2 * n if name == "dgc" else n, device="cuda")
        found["torch"] = (lambda: METHODS[name].encode(x, kept), moved)
    return found


def round_jobs(codec: compll.Codec, x: Any, state: Any) -> dict[str, tuple[Job, float]]:
    """What a rank computes of a codec's rounds, as the only one, and the least bytes it moves."""
    n, at = len(x), np.zeros(1, np.int64)
    table, options = np.array([[0, n, 0, 0, 0]], np.int64), {"workers": 1, "state": state}
    residual = sum(s.item_bits / 8 for s in codec.module.states if s.name == "residual")
    found: dict[str, tuple[Job, float]] = {}
    sums: list[tuple[Any, Any]] = []
    for number, one in enumerate(codec.rounds):
        out = codec.arrays.zeros(one.payload_bytes(n), "uint8")
        job = partial(codec.encode_round, number, x, table, out, at, tuple(sums), **options)
        job()
        found[f"round_{one.name}"] = (job, 4 + residual + len(out) / n)
        sums.append((out, at))
    if sums:
        sizes = sum(len(out) for out, _ in sums) / n
        last = partial(codec.decode_rounds, x.copy(), table, sums, **options)
        found["decode_rounds"] = (last, sizes + 4 + (4 + 2 * residual) * bool(residual))
    return found


def milliseconds(work: dict[str, Job], repeat: int) -> dict[str, float]:
    """Median milliseconds of each job on the device; the jobs take turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeat + 2):
        for name, job in work.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            job()
            end.record()
            end.synchronize()
            if turn > 1:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def measure(name: str, megabytes: int, repeat: int) -> dict[str, Any]:
    """One row: milliseconds, GB/s of gradient, and the share of what copy bandwidth allows."""
    n = megabytes * (1 << 18)
    source, target = torch.ones(n, device="cuda"), torch.zeros(n, device="cuda")
    known = jobs(name, n)
    took = milliseconds(
        {"copy": lambda: target.copy_(source), **{k: job for k, (job, _) in known.items()}}, repeat
    )
    copy = 8 * n / took["copy"] / 1e6
    row: dict[str, Any] = {"codec": name, "megabytes": megabytes, "copy_GBps": copy}
    for key, (_, moved) in known.items():
        floor = moved * n / copy / 1e6
        row[key] = {
            "ms": took[key], "GBps": 4 * n / took[key] / 1e6, "bytes_per_element": moved,
            "share_of_copy_time": floor / took[key],
        }  # fmt: skip
    return row


def show(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(title="CUDA kernels, float32 gradient", title_justify="left")
    for head in ("codec", "MB", "copy GB/s", "encode ms", "GB/s", "of copy time", "decode-add ms",
                 "GB/s", "of copy time", "x torch.topk"):  # fmt: skip
        table.add_column(head, justify="left" if head == "codec" else "right")
    for row in rows:
        cells = [row["codec"], str(row["megabytes"]), f"{row['copy_GBps']:.0f}"]
        for key in ("encode", "decode_add"):
            one = row[key]
            cells += [f"{one['ms']:.3f}", f"{one['GBps']:.0f}", f"{one['share_of_copy_time']:.0%}"]
        faster = row["torch"]["ms"] / row["encode"]["ms"] if "torch" in row else None
        table.add_row(*cells, f"{faster:.1f}" if faster else "-")
    return table


def about(repeat: int) -> dict[str, Any]:
    """Date, device and versions."""
    import cupy

    return {
        "date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "repeat": repeat,
        "torch": torch.__version__, "cupy": cupy.__version__,
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
    }  # fmt: skip


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="codecs; all that compile when none is named")
    ] = None,
    sizes: Annotated[str, typer.Option(help="megabytes of gradient")] = "1,16,256,1024",
    repeat: Annotated[int, typer.Option(help="timed turns; the median counts")] = 21,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """Measure the codecs and write gpu.json."""
    rows, left_out = [], {}
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no CUDA device")
    for name in track(names or compll.list_specs(), "measuring"):
        try:
            rows += [measure(name, int(size), repeat) for size in sizes.split(",")]
        except (CompllError, RuntimeError, MemoryError) as why:  # such as no memory left
            left_out[name] = f"{type(why).__name__}: {why}"
    console = Console(width=120)
    console.print(show(rows))
    for name, reason in left_out.items():
        console.print(f"{name}: {reason}")
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": about(repeat), "rows": rows, "left_out": left_out}, indent=1)
    (output / "gpu.json").write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
