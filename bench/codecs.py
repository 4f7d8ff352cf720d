"""GB/s of gradient that every codec encodes and decodes on one core, against the machine's copy
bandwidth and a plain-torch implementation, all measured in turn in one run.

    python -m bench.codecs [NAMES...] [--elements 12000000] [--repeat 9]
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numba
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

import compll
from bench.plain_torch import ENCODERS
from compll.passes import schedule
from compll.traffic import traffic

RESULTS = Path(__file__).parent / "results"
Job = Callable[[], object]


def jobs(name: str, n: int) -> dict[str, Job]:
    """What is timed for one codec, over a gradient of n elements."""
    codec = compll.compile(name)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(n) * 0.01).astype(np.float32)
    y = np.zeros(n, np.float32)
    table, at = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
    out = np.zeros(codec.payload_bytes(n), np.uint8)
    used = codec.encode_batch(x, table, out, at)
    found: dict[str, Job] = {
        "decode": lambda: codec.decode_batch(out, table, at, used, y),
        "decode_add": lambda: codec.decode_batch(out, table, at, used, y, add=True),
    }
    # A payload of its own, so that decode's stays whole whatever the state does to its length.
    spare = np.zeros_like(out)
    state = codec.init_state(n) if codec.stateful else None
    if not codec.module.updates:
        found["encode"] = lambda: codec.encode_batch(x, table, spare, at)
    if state is not None:
        found["encode_feedback"] = lambda: codec.encode_batch(x, table, spare, at, state=state)
    if name in ENCODERS:
        kept = torch.zeros(2 * n if name == "dgc" else n) if codec.stateful else None
        source = torch.from_numpy(x)
        found["torch"] = lambda: ENCODERS[name](source, kept)
    return found


def seconds(work: dict[str, Job], repeat: int) -> dict[str, float]:
    """Median seconds of each job; the jobs take turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeat + 1):
        for name, job in work.items():
            start = time.perf_counter()
            job()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def bytes_moved(name: str) -> float:
    """Bytes per element that the passes of the stateful encode (or the only one) read and write."""
    module = compll.compile(name).module
    return traffic(schedule(module, feed=bool(module.states))).moved


def measure(name: str, n: int, repeat: int) -> dict[str, Any]:
    """One row: GB/s of float32 gradient for each job, and the share of the copy-bandwidth bound."""
    x, y = np.ones(n, np.float32), np.zeros(n, np.float32)
    work = {"copy": lambda: np.copyto(y, x), **jobs(name, n)}
    took = seconds(work, repeat)
    rates = {job: 4 * n / t / 1e9 for job, t in took.items()}
    copy = 2 * rates.pop("copy")
    moved = bytes_moved(name)
    best = rates.get("encode_feedback", rates.get("encode", 0.0))
    return {"codec": name, "copy_GBps": copy, "bytes_per_element": moved,
            "share_of_bound": best / (copy / moved * 4), **rates}  # fmt: skip


def show(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(title="GB/s of float32 gradient, one core", title_justify="left")
    for head in ("codec", "encode", "+ feedback", "decode", "decode-add", "plain torch", "x torch",
                 "bytes/elem", "of copy bound"):  # fmt: skip
        table.add_column(head, justify="left" if head == "codec" else "right")
    for row in rows:
        best = row.get("encode_feedback", row.get("encode", 0.0))
        table.add_row(
            row["codec"], *(f"{row[k]:.2f}" if k in row else "-" for k in
                            ("encode", "encode_feedback", "decode", "decode_add", "torch")),
            f"{best / row['torch']:.1f}" if "torch" in row else "-",
            f"{row['bytes_per_element']:.1f}", f"{row['share_of_bound']:.0%}",
        )  # fmt: skip
    return table


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="codecs; all when none is named")
    ] = None,
    elements: Annotated[int, typer.Option(help="length of the gradient")] = 12_000_000,
    repeat: Annotated[int, typer.Option(help="timed turns; the median counts")] = 9,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """Measure the codecs and write codecs.json."""
    torch.set_num_threads(1)
    elements -= elements % 1024
    rows = [measure(name, elements, repeat) for name in names or compll.list_specs()]
    Console(width=110).print(show(rows))
    output.mkdir(parents=True, exist_ok=True)
    about = {"date": date.today().isoformat(), "elements": elements, "repeat": repeat,
             "cpu": platform.processor() or platform.machine(), "torch": torch.__version__,
             "numba": numba.__version__, "numpy": np.__version__}  # fmt: skip
    (output / "codecs.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
