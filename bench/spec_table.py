"""The tables of docs/compressors.md, and of step times and losses in README.md.

python -m bench.codecs        # measures, writes bench/results/codecs.json
python -m bench.training       # measures step times
python -m bench.losses        # measures losses
python -m bench.spec_table    # writes the tables, and the evidence that hipress ships
python -m bench.spec_table --check
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import compll
from bench import loss_cells, loss_tables, step_times
from bench.codecs import RESULTS, encoding, speedup
from bench.loss_tables import Row
from bench.spec_facts import HIPRESS, Facts, facts
from hipress.tools.run.figures import markdown_table

DOCS = Path(__file__).parents[1] / "docs" / "compressors.md"
README = DOCS.parents[1] / "README.md"
EVIDENCE = DOCS.parents[1] / "hipress" / "plan" / "evidence.json"
#: the methods whose losses README.md shows
SHOWN = (
    *("fp32", "bf16", "int4_group", "int3_group", "onebit_group", "topk:ratio=0.01"),
    *("dgc:ratio=0.01", "powersgd:rank=4", "torch-powersgd:rank=4"),
)
Data = dict[str, Any]


def derived(known: Sequence[Facts]) -> str:
    """The table of facts that follow from the specs."""
    head = ("spec", "lines", "operators", "payload in bytes", "bits per element", "walks (least)",
            "bytes moved (least)", "keeps")  # fmt: skip
    rows = [
        (
            f"`{f.name}`", str(f.lines), ", ".join(f.operators) or "-",
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


def fill(text: str, tables: dict[str, str]) -> str:
    """The text with each table between its marks, <!-- NAME --> and <!-- /NAME -->."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, mark, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (mark and closed):
            raise ValueError(f"no {begin.strip()} and {end} in the text")
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


def losses(measured_rows: Sequence[Row], only: Sequence[str] = ()) -> str:
    """A table for each number of steps."""
    steps = sorted({row.steps for row in measured_rows})
    tables = ((each, [*loss_tables.table(measured_rows, each, only)]) for each in steps)
    return "\n\n".join(markdown_table(loss_tables.head(n), rows) for n, rows in tables if rows)


def readme(text: str, results: Path = RESULTS) -> str:
    """README.md with new tables of step times and losses."""
    speed = markdown_table(step_times.HEAD, step_times.cells(results))
    rows = [row for row in read_losses(results) if row.steps == 200]
    return fill(text, {"SPEED": speed, "LOSS": losses(rows, SHOWN)})


def read_losses(results: Path) -> list[Row]:
    """The measured losses."""
    return loss_tables.rows(loss_cells.read(results / loss_cells.CELLS.name))


def compressors_page(text: str, results: Path = RESULTS) -> str:
    """docs/compressors.md with all its tables made again."""
    known = [facts(name) for name in compll.list_specs()]
    tables = {"SPECS": derived(known), "LINES": lines_of_code(known)}
    tables["LOSS"] = losses(read_losses(results))
    speed = results / "codecs.json"
    if speed.is_file():
        tables["SPEED"] = speeds(json.loads(speed.read_text()))
    return fill(text, tables)


def evidence(text: str, results: Path = RESULTS) -> str:
    """The content of hipress/plan/evidence.json."""
    return loss_tables.evidence(read_losses(results))


def main(
    check: Annotated[bool, typer.Option("--check", help="only check the tables")] = False,
) -> None:
    """Rewrite the tables of docs/compressors.md and README.md, and the evidence."""
    for path, make in ((DOCS, compressors_page), (README, readme), (EVIDENCE, evidence)):
        text = path.read_text("utf-8") if path.exists() else ""
        new = make(text)
        if check and new != text:
            message = (
                f"{path.name} is not what the specs and results say: python -m bench.spec_table"
            )
            typer.echo(message)
            raise typer.Exit(1)
        if not check:
            path.write_text(new, "utf-8")


if __name__ == "__main__":
    typer.run(main)
