"""Cycles that the machine code of CUDA kernels takes on a multiprocessor, without a device.

    python -m bench.gpu_code [NAMES...] [--arch sm_90]

They bound walks over tiles from below, as memory traffic does. This counts the instructions of
ready tiles (see prelude.cuh), without writing the gradient back, as nvdisasm shows them, each once:
remaining loops count too little, skipped branches too much. For searches, the walk that makes keys
is counted, not histograms, whose bytes are. Cycles are of throughput alone; latency comes on top if
too few warps are resident. Rows of specs that are not named stay as they are in gpu_code.json.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.commands import RESULTS, check_codecs, command_line, other_rows, refusing
from compll.backends.cuda import nvrtc as cuda_nvrtc
from compll.backends.cuda import source as cuda_source
from compll.errors import SpecError, UsageError
from compll.ir.layout import payload_bytes
from compll.runtime import library
from hipress.tools.refusals import check_output

#: an H200's: bytes a second of a copy, multiprocessors, cycles a second
COPY, PROCESSORS, CLOCK = 4.3e12, 132, 1.7e9
#: warps' instructions a cycle of a multiprocessor by unit, of compute capability 9.0 (CUDA C++
#: Programming Guide, "Throughput of Native Arithmetic Instructions")
RATES = {"issue": 4.0, "alu": 2.0, "fma": 4.0, "imad": 2.0, "xu": 0.5, "fp64": 2.0, "lsu": 1.0}
UNITS = {
    "alu": "LOP3 SHF IADD3 VIADD VIMNMX VIMNMX3 IMNMX FMNMX SEL FSEL ISETP FSETP LEA PRMT MOV FCHK "
    "IABS PLOP3 BMSK SGXT",
    "fma": "FMUL FADD FFMA", "imad": "IMAD", "xu": "MUFU F2I F2IP I2F FRND F2F I2FP POPC",
    "fp64": "DADD DMUL DFMA DSETP", "lsu": "LDG STG LDS STS SHFL ATOMS ATOMG RED",
}  # fmt: skip
UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names.split()}
ELEMENTS = 1 << 24  # of the tensor whose payload is measured
EACH = 1024  # elements per figure
Row = dict[str, Any]


def ready_only(text: str) -> str:
    """The source without the code for tiles that are not ready, and without writing back."""
    text = re.sub(r"else tile\(Ready<false>\(\)\);", "", text)
    return re.sub(r"if \(back\)", "if (false)", text)


def disassemble(cubin: bytes) -> dict[str, list[str]]:
    """Names of the instructions of every kernel, without those in slow functions."""
    tool = next(
        file.locate()
        for file in importlib.metadata.files("nvidia-cuda-nvdisasm") or ()
        if file.name == "nvdisasm"
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [str(tool), "-c", file.name], capture_output=True, text=True, check=True
        )
    by_kernel: dict[str, list[str]] = {}
    blocks: list[str] = []
    inside = False
    for line in map(str.strip, listing.stdout.splitlines()):
        if head := re.fullmatch(r"\.text\.(\w+):", line):
            blocks, inside = by_kernel.setdefault(head[1], []), True
        elif line.startswith("$") and line.endswith(":"):
            inside = False
        elif inside and (one := re.match(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(\w+)", line)):
            blocks.append(one[1])
    return by_kernel


def rows_of(name: str, arch: str) -> list[Row]:
    """The walks over tiles of a spec: encode, with feedback if it has any, and decode-add."""
    module, params = library.type_check(name, {})
    source = cuda_source.source(module)
    cubin, _ = cuda_nvrtc.compiled(ready_only(source.full()), arch)
    _, used = cuda_nvrtc.compiled(source.full(), arch)  # as it is launched
    code, rows = disassemble(cubin), list[Row]()
    fed = "feed" in source.plans
    begin = "feed" if fed else "encode"
    walks = {
        "encode": (f"{begin}_(walk|keys|count)\\d+", cuda_source.moved(module, feed=fed)),
        "decode_add": (
            "decode_add_walk\\d+", 8 + payload_bytes(module, ELEMENTS, params) / ELEMENTS
        ),
    }  # fmt: skip
    for what, (pattern, moved) in walks.items():
        kernels = sorted(k for k in code if re.fullmatch(pattern, k))
        if not kernels:
            continue
        counts = Counter(UNIT_OF.get(i, "other") for k in kernels for i in code[k])
        counts["issue"] = counts.total()
        tiles = EACH / (128 * source.shape.rows)  # that a warp takes for as many elements
        counts = Counter({unit: round(count * tiles) for unit, count in counts.items()})
        cycles = {unit: counts[unit] / rate for unit, rate in RATES.items()}
        memory = moved * EACH / (COPY / PROCESSORS / CLOCK)
        rows.append({
            "spec": name, "what": what, "kernels": len(kernels),
            "registers": max(used[k].registers for k in kernels),
            "local_bytes": max(used[k].local for k in kernels),
            "instructions_per_1024": counts["issue"],
            "cycles_per_1024": {unit: round(c, 1) for unit, c in cycles.items()},
            "memory_cycles_per_1024": round(memory, 1),
            "share_of_copy_time_at_most": round(min(1.0, memory / max(cycles.values())), 3),
        })  # fmt: skip
    return rows


def show(rows: list[Row], arch: str) -> Table:
    """The rows as a table."""
    table = Table(
        title=f"Walks over tiles on {arch}, cycles of 1024 elements", title_justify="left"
    )
    for head in ("codec", "", "registers", "local bytes", "instructions", "issue", "alu", "xu",
                 "memory", "of copy time, at most"):  # fmt: skip
        table.add_column(head, justify="left" if head in ("codec", "") else "right")
    for one in rows:
        cycles = one["cycles_per_1024"]
        first = ("spec", "what", "registers", "local_bytes", "instructions_per_1024")
        table.add_row(
            *(str(one[key]) for key in first),
            *(f"{cycles[unit]:.0f}" for unit in ("issue", "alu", "xu")),
            f"{one['memory_cycles_per_1024']:.0f}", f"{one['share_of_copy_time_at_most']:.0%}",
        )  # fmt: skip
    return table


def main(
    names: Annotated[list[str] | None, typer.Argument(help="specs; all when none is named")] = None,
    arch: Annotated[str, typer.Option(help="a GPU to compile for")] = "sm_90",
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """Count the instructions and write gpu_code.json."""
    path = output / "gpu_code.json"
    about = {
        "date": date.today().isoformat(), "command": command_line("bench.gpu_code"), "arch": arch,
        "nvrtc": importlib.metadata.version("nvidia-cuda-nvrtc"),
        "nvdisasm": importlib.metadata.version("nvidia-cuda-nvdisasm"),
        "copy_bytes_per_s": COPY, "processors": PROCESSORS, "clock_hz": CLOCK,
        "warp_instructions_per_cycle": RATES,
    }  # fmt: skip
    with refusing():
        check_codecs(names or ())
        check_output(output)
        others = other_rows(path, about, names, "spec") if names else []
    rows: list[Row] = []
    for name in track(names or library.list_specs(), "compiling"):
        try:
            rows += rows_of(name, arch)
        except (SpecError, UsageError) as why:
            Console(stderr=True).print(f"{name}: {why}")
    Console(width=120).print(show(rows, arch))
    every = sorted([*others, *rows], key=lambda row: str(row["spec"]))
    path.write_text(json.dumps({"about": about, "rows": every}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
