"""The command line `compll`; commands for authors are in cli_author.py."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compll import artifacts, cli_author, explain, library, report
from compll.cli_common import (
    Params,
    SomeSpecs,
    Specs,
    Target,
    compiled,
    each,
    known_target,
    parameters,
    usage,
)
from compll.codec import Codec
from compll.errors import CompllError, nearest

app = typer.Typer(
    help="Gradient compressors from YAML specs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (cli_author.new, cli_author.schema, cli_author.bench):
    app.command()(command)


@app.command("list")
def list_() -> None:
    """The compressors that come with the package."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True, min_width=max(map(len, library.list_specs())))
    for title in ("bits", "group", "keeps", "optimizers", "about"):
        table.add_column(title)
    for name in library.list_specs():
        module, params = library.type_check(name, {})
        codec = library.compile(name, "reference", **params)
        kept = ", ".join(s.name for s in module.states) or "-"
        group = str(module.group or "-")
        table.add_row(
            name, f"{report.bits(codec):.4g}", group, kept, module.optimizers, module.about
        )
    Console(soft_wrap=False).print(table)


@app.command()
def check(specs: Specs, param: Params = None) -> None:
    """Check specs; every problem of every file is reported at once."""
    params = parameters(param)
    each(specs, lambda name: library.type_check(name, params))
    typer.echo(f"{len(specs)} checked, no problems")


@app.command("explain")
def explain_(
    spec: Annotated[str, typer.Argument(help="name of a spec, or path of a YAML file")],
    param: Params = None,
    stage: Annotated[
        list[str] | None, typer.Option(help=f"one of {', '.join(explain.STAGES)}; may repeat")
    ] = None,
    traffic: Annotated[bool, typer.Option("--traffic", help="short for --stage traffic")] = False,
    target: Target = "cpu",
) -> None:
    """Show each stage of the compiler, and the memory traffic."""
    stages = (stage or []) + ["traffic"] * traffic
    stages = stages or [s for s in explain.STAGES if s != "source"]
    unknown = [s for s in stages if s not in explain.STAGES]
    if unknown:
        usage(f"no stage {unknown[0]!r}: {nearest(unknown[0], explain.STAGES)}")
    known_target(target)
    codec, parsed = compiled(spec, "reference", parameters(param)), library.load(spec)
    for name in stages:
        text = each([name], lambda stage: explain.stage(stage, parsed, codec, target))[0]
        typer.echo(f"\n--- {name}\n{text}" if len(stages) > 1 else text)


@app.command()
def build(
    specs: SomeSpecs = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder")] = Path("compll-out"),
    param: Params = None,
    target: Target = "cpu",
    arch: Annotated[str, typer.Option(help="with cuda: a GPU to compile for, like sm_90")] = "",
) -> None:
    """Compile specs; write the generated source and a report of each."""
    known_target(target)
    params = parameters(param)
    made = each(specs or library.list_specs(), lambda name: built(name, target, params, arch))
    try:
        output.mkdir(parents=True, exist_ok=True)
        for one in made:
            for ending, data in one.files.items():
                (output / f"{one.codec.name}.{ending}").write_bytes(data)
    except OSError as error:
        usage(f"cannot write to {output}: {error.strerror}")
    Console().print(summary([one.codec for one in made]))
    typer.echo(f"source and reports: {output}/")


@dataclass(frozen=True)
class Built:
    """A compiled spec, and files by their endings."""

    codec: Codec
    files: dict[str, bytes]


def built(name: str, target: str, params: dict[str, object], arch: str) -> Built:
    """Compile for `target`; source, binaries if asked for, and reports. Raises SpecError."""
    made = "reference" if target in artifacts.DEVICES else target
    codec = library.compile(name, made, **params)
    texts = artifacts.sources(target, codec.module, codec.params)
    files = {ending: text.encode() for ending, text in texts.items()}
    if arch:
        files |= artifacts.binaries(target, texts, arch)
    facts = json.dumps(report.facts(codec, target), indent=1) + "\n"
    files["report.json"] = facts.encode()
    files["report.md"] = report.markdown(codec, target).encode()
    return Built(codec, files)


def summary(codecs: list[Codec]) -> Table:
    """What was built: payload, passes, traffic."""
    table = Table(
        "name", "payload", "bits", "passes", "bytes moved", "least", box=None, pad_edge=False
    )
    for codec in codecs:
        places = ", ".join(f"{p.name} {p.type}" for p in explain.places(codec.module))
        found = explain.found_traffic(codec.module)
        table.add_row(
            codec.name, escape(places), f"{report.bits(codec):.4g}", str(len(found.passes)),
            f"{found.moved:.4g}", f"{found.least:.4g}",
        )  # fmt: skip
    return table


def main() -> None:
    """The entry point of the console script."""
    try:
        app()
    except CompllError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)
