"""Marked blocks of README.md, the documentation and bench/results, and the evidence that hipress
ships.

python -m bench.pages           # writes what was recorded, or follows from the specs
python -m bench.pages --check   # only checks: part of `make docs`

A figure is quoted in a block, <!-- NAME --> to <!-- /NAME -->, or in one place alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from bench import help_table, loss_tables, measured_tables, spec_table, step_times
from bench.commands import RESULTS
from hipress import options
from hipress.tools.run.figures import markdown_table

ROOT = Path(__file__).parents[1]
#: the methods whose losses README.md shows
SHOWN = ("fp32", "bf16", "int4_group", "onebit_group", "powersgd:rank=4")


def readme(results: Path) -> dict[str, str]:
    """Blocks of README.md."""
    rows = [row for row in spec_table.read_losses(results) if row.steps == 200]
    host = help_table.host_milliseconds(results)
    told = (
        f"On an H100 the host took {host[0]:.0f} to {host[-1]:.0f} ms longer for a step of GPT-2 "
        "small with `int4_group` than with DDP,\nby day and number of ranks; CUDA graphs "
        "(`capture=True`) save part of it "
        "([figures](docs/measurements/cuda.md#a-step-of-gpt-2-small))."
    )
    return {"HELP": help_table.table(), "LOSS": spec_table.losses(rows, SHOWN), "HOST": told}


def steps_page(results: Path) -> dict[str, str]:
    """Blocks of docs/measurements/steps.md."""
    speed = markdown_table(step_times.HEAD, step_times.cells(results))
    return {"SPEED": speed, "POLICIES": measured_tables.recorded(results / "policies.md")[0]}


def losses_page(results: Path) -> dict[str, str]:
    """Blocks of docs/measurements/losses.md."""
    links = ("slow-adamw", "hosts2-adamw", "hosts2-adamw-10gbit")
    return {
        "WAYS": measured_tables.of_ways(spec_table.read_losses(results)),
        "GPT2": measured_tables.of_gpt2(results),
        "TIMES": measured_tables.times_to_loss(results, links),
    }


def regions_page(results: Path) -> dict[str, str]:
    """Blocks of docs/measurements/regions.md."""
    links = ("outer-100mbit", "outer-100mbit-rounds", "outer-10mbit", "outer-10mbit-rounds")
    return {"ROUNDS": measured_tables.times_to_loss(results, links)}


def gpu_page(results: Path) -> dict[str, str]:
    """Blocks of docs/measurements/cuda.md."""
    return {
        "GPU_SPEEDS": measured_tables.gpu_speeds(results),
        "GPU_BOUNDS": measured_tables.gpu_bounds(results),
        "GPU_STEPS": measured_tables.gpu_steps(results),
        "GPU_CHOICES": measured_tables.gpu_choices(results),
    }


def shards_page(results: Path) -> dict[str, str]:
    """Blocks of docs/measurements/shards.md: the tables of bench/results/shards.md."""
    shards, replicas = measured_tables.recorded(results / "shards.md")
    return {"SHARDS": shards, "REPLICAS": replicas}


def planner_page(results: Path) -> dict[str, str]:
    """Blocks of docs/how/planner.md."""
    return {"CHOICES": measured_tables.recorded(results / "choices.md")[0]}


#: blocks of each page
BLOCKS: Mapping[str, Callable[[Path], dict[str, str]]] = {
    "README.md": readme,
    "docs/start/help.md": lambda _: {"HAND": help_table.arithmetic()},
    "docs/start/slow.md": lambda _: {"LINKS": help_table.links()},
    "docs/measurements/ablation.md": lambda results: {
        "ABLATION": measured_tables.ablation(results)
    },
    "docs/measurements/cuda.md": gpu_page,
    "docs/measurements/losses.md": losses_page,
    "docs/measurements/regions.md": regions_page,
    "docs/measurements/shards.md": shards_page,
    "docs/measurements/steps.md": steps_page,
    "docs/measurements/compressors.md": spec_table.blocks,
    "bench/results/compressors.md": spec_table.all_blocks,
    "bench/results/freezes.md": lambda results: {"FROZEN": measured_tables.frozen(results)},
    "bench/results/outer.md": lambda results: {"SITES": measured_tables.sites(results)},
    "docs/how/planner.md": planner_page,
    "docs/use/weights.md": lambda results: {
        "WEIGHT_SPEEDS": measured_tables.weight_speeds(results),
        "WEIGHT_LINKS": measured_tables.weight_links(results),
    },
    "docs/use/wrap.md": lambda _: {
        "OPTIONS": markdown_table(("option", "effect", "also an option of"), options.table())
    },
}
EVIDENCE = "hipress/choose/evidence.json"


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """The text with each block between its marks."""
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, mark, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (mark and closed):
            raise ValueError(f"no {begin.strip()} and {end} in the text")
        text = f"{before}{begin}\n{block}\n\n{end}{after}"
    return text


def current(root: Path = ROOT) -> dict[Path, str]:
    """Texts that files are to contain, by the specs and results."""
    texts = {
        root / page: fill((root / page).read_text("utf-8"), blocks(RESULTS))
        for page, blocks in BLOCKS.items()
    }
    texts[root / EVIDENCE] = loss_tables.evidence(spec_table.read_losses(RESULTS))
    return texts


def main(
    check: Annotated[bool, typer.Option("--check", help="only check the blocks")] = False,
) -> None:
    """Rewrite the blocks of README.md, docs/ and bench/results/, and the evidence."""
    texts = current(ROOT)
    old = [path for path, text in texts.items() if path.read_text("utf-8") != text]
    for path in old:
        if check:
            typer.echo(f"{path.relative_to(ROOT)} is not what specs and results say")
        else:
            path.write_text(texts[path], "utf-8")
    if check and old:
        typer.echo("run python -m bench.pages")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
