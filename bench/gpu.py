"""GB/s of gradient that each codec encodes and decodes on a GPU.

    python -m bench.gpu [NAMES...] [--sizes 1,16,256,1024] [--repeat 21]
    python -m bench.gpu --add dgc topk      # rows of others, or other sizes, stay in gpu.json

Compared with the GPU's measured copy bandwidth and, for dgc and topk, with an encoder built on
torch.topk; all in turn in one run. Needs CuPy, a CUDA build of torch, and a device. gpu.json is
written after every row.

`ms` is the device's time: it spins while the host queues the work. `host_ms` is the time of the
call itself, which bounds small tensors. A job that waits for the device, as torch's dgc does,
cannot be queued ahead: its `ms` includes the host's time (`queued` is false).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

import compll
from bench.commands import RESULTS, check_codecs, command_line, refusing
from bench.gpu_times import Job, Times, require_gpu, timed
from bench.plain_torch import METHODS
from compll.backends.cuda.source import moved as moved_by
from compll.files import write_json
from compll.runtime import library
from hipress.tools.refusals import check_output
from hipress.tools.run import methods

TORCH_BASELINES = ("dgc", "topk")  # methods of plain_torch that use torch.topk


def jobs(name: str, n: int) -> dict[str, tuple[Job, float]]:
    """Timed jobs of a codec over n float32 elements, and the bytes per element that each moves."""
    method = methods.parse(f"hipress:{name}")
    codec = compll.compile(str(method.codec), "cuda", **method.options)
    x = 0.01 * torch.randn(n, device="cuda")
    view, y = codec.arrays.vector(x, name), codec.arrays.zeros(n, "float32")
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out, spare = (codec.arrays.zeros(codec.payload_bytes(n), "uint8") for _ in range(2))
    state = codec.init_state(n) if codec.stateful else None
    moved = moved_by(codec.module, with_states=state is not None)
    used = codec.encode_batch(view, table, out, at).copy()
    share = float(used[0]) / n
    by_name: dict[str, tuple[Job, float]] = {
        "encode": (lambda: codec.encode_batch(view, table, spare, at, state=state), moved),
        "decode_add": (
            lambda: codec.decode_batch(out, table, at, used, y, add=True),
            share * 5 if codec.module.selections else 8 + share,
        ),
    }
    by_name |= round_jobs(codec, view, state)
    if name in TORCH_BASELINES:
        residual = torch.zeros(2 * n if name == "dgc" else n, device="cuda")
        by_name["torch"] = (lambda: METHODS[name].encode(x, residual), moved)
    return by_name


def round_jobs(codec: compll.Codec, x: Any, state: Any) -> dict[str, tuple[Job, float]]:
    """The computation of a codec's rounds on a lone rank, and the least bytes that it moves."""
    n, at = len(x), np.zeros(1, np.int64)
    table, options = np.array([[0, n, 0, 0, 0]], np.int64), {"workers": 1, "state": state}
    residual = sum(s.item_bits / 8 for s in codec.module.states if s.name == "residual")
    by_name: dict[str, tuple[Job, float]] = {}
    sums: list[tuple[Any, Any]] = []
    for number, one in enumerate(codec.rounds):
        out = codec.arrays.zeros(one.payload_bytes(n), "uint8")
        job = partial(codec.encode_round, number, x, table, out, at, tuple(sums), **options)
        job()
        by_name[f"round_{one.name}"] = (job, 4 + residual + len(out) / n)
        sums.append((out, at))
    if sums:
        sizes = sum(len(out) for out, _ in sums) / n
        last = partial(codec.decode_rounds, x.copy(), table, sums, **options)
        by_name["decode_rounds"] = (last, sizes + 4 + (4 + 2 * residual) * bool(residual))
    return by_name


def release() -> None:
    """Free the memory that codecs keep: the process's cache of codecs, and all scratch."""
    import cupy

    library._compiled.clear()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()


def measure(name: str, megabytes: int, repeat: int) -> dict[str, Any]:
    """A row, as row_of makes it."""
    release()
    n = megabytes * (1 << 18)
    source, target = torch.ones(n, device="cuda"), torch.zeros(n, device="cuda")
    known = jobs(name, n)
    work: dict[str, Job] = {"copy": lambda: target.copy_(source)}
    took = timed(work | {key: job for key, (job, _) in known.items()}, repeat)
    moved = {key: each for key, (_, each) in known.items()}
    which = {
        "codec": name, "megabytes": megabytes,
        "date": date.today().isoformat(), "device": torch.cuda.get_device_name(),
    }  # fmt: skip
    return which | row_of(n, took, moved, torch.cuda.get_device_properties(0).L2_cache_size)


def row_of(
    n: int, took: Mapping[str, Times], moved: Mapping[str, float], cache_bytes: int
) -> dict[str, Any]:
    """Times, GB/s of gradient, and the share of the rate that the copy bandwidth allows.

    The share is missing if the copy's arrays, or half of them, fit the device's cache: a codec
    reads and writes other amounts, and finds more or less of them there.
    """
    cached = 8 * n <= 2 * cache_bytes
    copy = 8 * n / took["copy"].ms / 1e6
    row: dict[str, Any] = {"cached": cached, "copy_GBps": copy}
    for key, each in moved.items():
        one, floor = took[key], each * n / copy / 1e6
        row[key] = {
            "ms": one.ms, "host_ms": one.host_ms, "queued": one.queued,
            "GBps": 4 * n / one.ms / 1e6, "bytes_per_element": each,
            "share_of_copy_time": None if cached else floor / one.ms,
        }  # fmt: skip
    return row


@dataclass
class Report:
    """Rows, and reasons for missing ones, by codec and size."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, megabytes: int, repeat: int) -> str:
        """Measure a row, or record the error, replacing earlier values; returns a line of text."""
        label = label_of(name, megabytes)
        self.rows.pop(label, None)
        self.left_out.pop(label, None)
        try:
            self.rows[label] = row = measure(name, megabytes, repeat)
            return f"{label}: {', '.join(f'{key} {ms}' for key, ms in in_ms(row).items())}"
        except Exception as why:  # whatever it is, other rows are worth their time
            self.left_out[label] = f"{type(why).__name__}: {why}"
            return f"{label}: {self.left_out[label]}"

    def write(self, path: Path, facts: dict[str, Any]) -> None:
        """Write JSON; if interrupted, the earlier file stays."""
        rows = sorted(self.rows.values(), key=lambda row: (row["codec"], row["megabytes"]))
        content = {"about": facts, "rows": rows, "left_out": self.left_out}
        write_json(path, content)


def label_of(name: str, megabytes: int) -> str:
    return f"{name} {megabytes} MB"


def read(path: Path) -> Report:
    """The rows of a file."""
    data = json.loads(path.read_text())
    rows = {label_of(row["codec"], row["megabytes"]): row for row in data["rows"]}
    return Report(rows, data["left_out"])


def in_ms(row: Mapping[str, Any]) -> dict[str, str]:
    """The device's time of each job of a row, marked if it includes the host's."""
    jobs = {key: each for key, each in row.items() if isinstance(each, dict)}
    return {key: f"{each['ms']:.3f}{'' if each['queued'] else '*'}" for key, each in jobs.items()}


def show(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(title="CUDA kernels, float32 gradient", title_justify="left")
    table.caption = "* includes waiting for the host.  L2: the arrays fit the device's cache"
    for head in ("codec", "MB", "copy GB/s", "encode ms", "host ms", "GB/s", "of copy time",
                 "decode-add ms", "host ms", "GB/s", "of copy time", "x torch.topk"):  # fmt: skip
        table.add_column(head, justify="left" if head == "codec" else "right")
    for row in rows:
        cells = [row["codec"], str(row["megabytes"]), f"{row['copy_GBps']:.0f}"]
        for key in ("encode", "decode_add"):
            one, share = row[key], row[key]["share_of_copy_time"]
            cells += [in_ms(row)[key], f"{one['host_ms']:.3f}", f"{one['GBps']:.0f}"]
            cells += ["L2" if share is None else f"{share:.0%}"]
        faster = row["torch"]["ms"] / row["encode"]["ms"] if "torch" in row else None
        table.add_row(*cells, f"{faster:.1f}" if faster else "-")
    return table


def about(repeat: int) -> dict[str, Any]:
    """Date, device and versions of the last run."""
    import cupy

    return {
        "date": date.today().isoformat(), "command": command_line("bench.gpu"), "repeat": repeat,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "cupy": cupy.__version__,
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
    }  # fmt: skip


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="codecs; all that compile when none is named")
    ] = None,
    sizes: Annotated[str, typer.Option(help="megabytes of gradient")] = "1,16,256,1024",
    repeat: Annotated[int, typer.Option(help="timed turns; the median counts", min=1)] = 21,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    add: Annotated[bool, typer.Option("--add", help="keep the file's other rows")] = False,
) -> None:
    """Measure the codecs and write gpu.json."""
    with refusing():
        require_gpu()
        check_codecs(names or ())
        check_output(output)
        megabytes = [int(size) for size in sizes.split(",")]
    path, facts = output / "gpu.json", about(repeat)
    report = read(path) if add and path.exists() else Report()
    begun = []
    for name in names or compll.list_specs():
        for size in megabytes:
            begun.append(label_of(name, size))
            print(report.take(name, size, repeat), flush=True)
            report.write(path, facts)
    Console(width=140).print(show([report.rows[each] for each in begun if each in report.rows]))


if __name__ == "__main__":
    typer.run(main)
