"""GB/s of gradient that each codec encodes and decodes on one core.

    python -m bench.codecs [NAMES...] [--elements 12000000] [--repeat 9]
    python -m bench.codecs onebit_group:residual=bfloat16

Compared with the machine's copy bandwidth and a plain-torch implementation, all measured in turn in
one run. Rows of codecs that are not named stay as they are in codecs.json, and must be of the same
machine, versions and options.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import compll
from bench.commands import RESULTS, check_codecs, command_line, other_rows, refusing
from bench.plain_torch import METHODS, Method
from compll.files import write_json
from compll.tools import measure
from compll.tools.measure import Job, Timing, about, timings
from hipress.tools.refusals import check_output
from hipress.tools.run import methods

#: parameters that are measured besides the defaults
VARIANTS = ("onebit_group:residual=bfloat16",)
GROUPS = 16384  # elements; whole groups of every codec


def keep_memory() -> bool:
    """Make malloc keep freed memory, for this process. Returns False if it cannot (glibc's can).

    Otherwise arrays of more than 32 MB are new pages each time. Plain torch makes many of them,
    where ours are given theirs, and would pay for them: several times its own work.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    most_mapped, least_trimmed = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD
    return bool(mallopt(most_mapped, 0) and mallopt(least_trimmed, 2**31 - 1))


def torch_jobs(method: Method, n: int, *, stateful: bool) -> dict[str, Job]:
    """The same method's encode and decode in plain torch."""
    x = torch.randn(n) * 0.01
    state = torch.zeros(method.states * n) if stateful else None
    payload = method.encode(x, None if state is None else state.clone())
    return {
        "torch_encode": lambda: method.encode(x, state),
        "torch_decode": lambda: method.decode(payload, n),
    }


def measure_codec(name: str, n: int, repeat: int) -> dict[str, Any]:
    """A row: the codec's rates (compll.tools.measure), and GB/s of plain torch.

    name: a spec's, also with parameters, as in dgc:ratio=0.01.
    """
    method = methods.parse(f"hipress:{name}")
    codec = compll.compile(str(method.codec), **method.options)
    bench = measure.prepare(codec, n)
    work = {"copy": measure.copy_job(codec, n), **bench.jobs}
    if name in METHODS:
        work |= torch_jobs(METHODS[name], n, stateful=codec.stateful)
    took = timings(work, repeat)
    row = measure.row(bench, took).data()
    return row | {"codec": name, "torch": torch_rates(took, n)}


def torch_rates(took: dict[str, Timing], n: int) -> dict[str, float]:
    """GB/s of plain torch's encode and decode, if they were timed."""
    names = {"encode": "torch_encode", "decode": "torch_decode"}
    return {job: 4 * n / took[key].median / 1e9 for job, key in names.items() if key in took}


def encoding(row: dict[str, Any]) -> dict[str, float]:
    """The rate of the encode that training uses: with feedback if the codec has any."""
    rate: dict[str, float] = row["rates"].get("encode_feedback") or row["rates"]["encode"]
    return rate


def speedup(row: dict[str, Any], job: str) -> float | None:
    """The speed-up over plain torch: `encode` (with feedback) or `decode`."""
    ours = encoding(row) if job == "encode" else row["rates"]["decode"]
    return ours["rate"] / row["torch"][job] if row["torch"] else None


def show(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(title="GB/s of float32 gradient, one core", title_justify="left", box=None)
    for head in ("codec", "encode", "+ feedback", "decode", "decode-add", "merge",
                 "torch encode", "x", "torch decode", "x", "of copy bound"):  # fmt: skip
        left = head == "codec"
        table.add_column(head, justify="left" if left else "right", no_wrap=left)
    for row in rows:
        rates = [row["rates"].get(name) for name in measure.OPERATIONS]
        pairs = [(row["torch"].get(job), speedup(row, job)) for job in ("encode", "decode")]
        table.add_row(
            row["codec"], *(f"{r['rate']:.2f}" if r else "-" for r in rates),
            *(f"{v:.1f}" if v else "-" for pair in pairs for v in pair),
            f"{encoding(row)['share']:.0%}",
        )  # fmt: skip
    return table


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="codecs; all when none is named")
    ] = None,
    elements: Annotated[int, typer.Option(help="length of the gradient", min=GROUPS)] = 12_000_000,
    repeat: Annotated[int, typer.Option(help="timed turns; the median counts", min=1)] = 9,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """Measure the codecs and write codecs.json."""
    chosen = names or [*compll.list_specs(), *VARIANTS]
    path = output / "codecs.json"
    elements -= elements % GROUPS  # whole groups, so that plain torch pads nothing
    how = {"elements": elements, "repeat": repeat, "memory kept": keep_memory()}
    facts = about() | {"torch": torch.__version__, "command": command_line("bench.codecs")} | how
    with refusing():
        check_codecs(chosen)
        check_output(output)
        others = other_rows(path, facts, chosen, "codec") if names else []
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure_codec(name, elements, repeat) for name in chosen]
    Console(width=120).print(show(rows))
    save([*others, *rows], path, facts)


def save(rows: Sequence[dict[str, Any]], path: Path, facts: dict[str, Any]) -> None:
    """Write the rows whose specs exist."""
    ordered = sorted(rows, key=lambda row: str(row["codec"]))
    known = [row for row in ordered if row["codec"].split(":")[0] in compll.list_specs()]
    write_json(path, {"about": facts, "rows": known})


if __name__ == "__main__":
    typer.run(main)
