"""The tables of docs/measurements/compressors.md and bench/results/compressors.md, which
`python -m bench.pages` writes.

python -m bench.codecs        # measures speeds, writes bench/results/codecs.json
python -m bench.losses        # measures losses
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import compll
from bench import loss_cells, loss_tables
from bench.codecs import encoding, speedup
from bench.loss_cells import MOMENTUM, SHARDED, TRIAL
from bench.loss_tables import Row
from bench.spec_facts import HIPRESS, Facts, facts
from hipress.tools.run.figures import markdown_table

Data = dict[str, Any]


def derived(known: Sequence[Facts]) -> str:
    """The table of facts that follow from the specs."""
    head = ("spec", "lines", "payload in bytes", "bits per element", "walks (least)",
            "bytes moved (least)", "keeps")  # fmt: skip
    rows = [
        (
            f"`{f.name}`", str(f.lines),
            "; ".join(f"`{text}`" for text in (f.payload, *f.limits)), f"{f.bits:.4g}",
            f"{f.walks} ({f.walks_least})", f"{f.moved:.4g} ({f.least:.4g})",
            ", ".join(f.states) or "-",
        )
        for f in known
    ]  # fmt: skip
    return markdown_table(head, rows)


def lines_of_code(known: Sequence[Facts]) -> str:
    """The table of numbers of lines, beside those that HiPress publishes."""
    head = ("HiPress", "lines there (logic + functions)", "here", "lines here", "share")
    rows = [
        (theirs, f"{logic} + {functions}", f"`{f.name}`", str(f.lines),
         f"{f.lines / (logic + functions):.0%}")
        for f in known if f.name in HIPRESS
        for theirs, logic, functions in [HIPRESS[f.name]]
    ]  # fmt: skip
    return markdown_table(head, rows)


def speeds(data: Data) -> str:
    """The table of measured speeds."""
    head = ("spec", "encode", "with feedback", "plain torch", "times", "decode", "plain torch",
            "times", "decode-add", "merge", "of copy bound")  # fmt: skip
    about = data["about"]
    rows = [list(cells(row)) for row in data["rows"]]
    text = [markdown_table(*without_empty(head, rows)), "", *summary(data["rows"])]
    text.append(
        f"{about['elements']:,} elements, median of {about['repeat']} turns, one core of "
        f"{about['cpu']}, {about['date']}; torch {about['torch']}, "
        f"NumPy {about['numpy']}."
    )
    return "\n".join(text)


def without_empty(
    head: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """A table without columns that are empty in all rows."""
    columns = [c for c in range(len(head)) if any(row[c] != "-" for row in rows)]
    return [head[c] for c in columns], [[row[c] for c in columns] for row in rows]


def cells(row: Data) -> Iterator[str]:
    """Rates and speed-ups of a codec."""

    def rate(name: str) -> str:
        return f"{row['rates'][name]['rate']:.1f}" if name in row["rates"] else "-"

    yield from (f"`{row['codec']}`", rate("encode"), rate("encode_feedback"))
    yield from versus(row, "encode")
    yield rate("decode")
    yield from versus(row, "decode")
    yield from (rate("decode_add"), rate("merge"), f"{encoding(row)['share']:.0%}")


def versus(row: Data, job: str) -> tuple[str, str]:
    """Plain torch's rate, and our speedup over it."""
    times = speedup(row, job)
    return ("-", "-") if times is None else (f"{row['torch'][job]:.2f}", f"{times:.1f}x")


def summary(rows: Sequence[Data]) -> Iterator[str]:
    """The median speedups, and the codecs that are slower than plain torch."""
    for job in ("encode", "decode"):
        by_codec = {r["codec"]: t for r in rows if (t := speedup(r, job)) is not None}
        slower = [f"`{name}` ({t:.2f}x)" for name, t in by_codec.items() if t < 1]
        if by_codec:
            middle = statistics.median(by_codec.values())
            yield (
                f"{job.capitalize()} is {middle:.1f}x as fast as plain torch in the median of "
                f"{len(by_codec)} methods; slower: {', '.join(slower) or 'none'}."
            )
    copies = sorted(row["copy"] for row in rows)
    yield f"Copy bandwidth in the same run: {copies[0]:.0f} to {copies[-1]:.0f} GB/s."


def losses(measured_rows: Sequence[Row], only: Sequence[str] = ()) -> str:
    """A table for each number of steps."""
    steps = sorted({row.steps for row in measured_rows})
    tables = ((each, [*loss_tables.table(measured_rows, each, only)]) for each in steps)
    return "\n\n".join(
        markdown_table(loss_tables.head(n), rows)
        for n, rows in tables
        if len(rows) > 1  # beside fp32
    )


def read_losses(results: Path) -> list[Row]:
    """The measured losses."""
    return loss_tables.rows(loss_cells.read(results / loss_cells.CELLS.name))


def _of_gradients(row: Row) -> bool:
    """True of averages of compressed gradients; others are in docs/measurements/losses.md."""
    return not row.method.startswith((MOMENTUM, SHARDED, TRIAL))


def chosen(known: Sequence[Facts], data: Data) -> str:
    """The facts and speeds of each spec by which one chooses."""
    rates = {row["codec"]: row for row in data["rows"]}
    head = ("spec", "bits per element", "walks", "keeps", "encode, GB/s", "decode, GB/s")
    rows = []
    for f in known:
        row = rates.get(f.name)
        encode = f"{encoding(row)['rate']:.1f}" if row else "-"
        decode = f"{row['rates']['decode']['rate']:.1f}" if row else "-"
        keeps = ", ".join(f.states) or "-"
        rows.append((f"`{f.name}`", f"{f.bits:.4g}", str(f.walks), keeps, encode, decode))
    return markdown_table(head, rows)


def blocks(results: Path) -> dict[str, str]:
    """The tables of docs/measurements/compressors.md; losses are of methods with several seeds."""
    known = [facts(name) for name in compll.list_specs()]
    data = json.loads((results / "codecs.json").read_text())
    rows = [row for row in read_losses(results) if _of_gradients(row)]
    several = {row.method for row in rows if row.seeds > 1}
    return {
        "SPECS": chosen(known, data),
        "LINES": lines_of_code(known),
        "LOSS": losses([row for row in rows if row.method in several]),
    }


def all_blocks(results: Path) -> dict[str, str]:
    """The tables of bench/results/compressors.md: every figure."""
    return {
        "SPECS": derived([facts(name) for name in compll.list_specs()]),
        "LOSS": losses([row for row in read_losses(results) if _of_gradients(row)]),
        "SPEED": speeds(json.loads((results / "codecs.json").read_text())),
    }
