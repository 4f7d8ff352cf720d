"""The command line `compll`; cli_author.py has the commands for authors."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from compll import __version__
from compll.errors import CompllError, Diagnostic, SpecError, UsageError, nearest
from compll.files import write_file
from compll.ir.places import places
from compll.passes import lower
from compll.runtime import library
from compll.runtime.codec import Codec
from compll.tools import artifacts, cli_author, explain, report
from compll.tools.cli_common import (
    Params,
    SomeSpecs,
    Specs,
    Strict,
    Target,
    compiled,
    each,
    known_target,
    parameters,
    usage,
    warn,
)

LINE = 200  # characters

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def show_version(wanted: bool) -> None:
    """Print the version and exit, if asked to."""
    if wanted:
        typer.echo(f"compll {__version__}")
        raise typer.Exit


@app.callback()
def compll(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    """Gradient compressors from YAML specs."""


for command in (cli_author.new, cli_author.schema, cli_author.bench):
    app.command()(command)


@app.command("list")
def list_() -> None:
    """The compressors that come with the package.

    Bits are the payload's per element, at most.
    """
    table = Table(box=None, pad_edge=False)
    for title in ("name", "bits"):
        table.add_column(title, no_wrap=True)
    table.add_column("about", overflow="fold")
    for name in library.list_specs():
        codec = library.compile(name, "reference")
        table.add_row(name, f"{report.bits(codec):.4g}", codec.module.about)
    # one line per spec, for programs that read them
    Console(width=None if sys.stdout.isatty() else LINE).print(table)


@app.command()
def check(specs: Specs, param: Params = None, strict: Strict = False) -> None:
    """Check specs; every problem of every file is reported at once."""
    params = parameters(param)
    each(specs, lambda name: lower.kernels(library.type_check(name, params).module))
    warnings = warn(specs, params)
    result = f"{warnings} warning{'s' * (warnings > 1)}" if warnings else "no problems"
    typer.echo(f"{len(specs)} checked, {result}")
    if strict and warnings:
        raise typer.Exit(1)


@app.command("explain")
def explain_(
    spec: Annotated[str, typer.Argument(help="name of a spec, or path of a YAML file")],
    param: Params = None,
    stage: Annotated[
        list[str] | None, typer.Option(help=f"one of {', '.join(explain.STAGES)}; may repeat")
    ] = None,
    traffic: Annotated[bool, typer.Option("--traffic", help="same as --stage traffic")] = False,
    target: Target = "cpu",
) -> None:
    """Show stages of the compiler (by default all but `source`), and the memory traffic."""
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
    target: Annotated[
        list[str] | None, typer.Option(help="cpu (the default), cuda or reference; may repeat")
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="with cuda: a GPU to compile for, like sm_90; may repeat"),
    ] = None,
    strict: Strict = False,
) -> None:
    """Compile specs; write the generated source and a report of each.

    Without names all specs are built that the targets can compile, and the others are listed.
    """
    targets, archs = several(target) or ["cpu"], several(arch)
    for each_target in targets:
        known_target(each_target)
    params, made, refused = parameters(param), list[Built](), list[Diagnostic]()
    names = distinct(specs or library.list_specs())
    for name in track(names, "compiling", console=Console(stderr=True), transient=True):
        try:
            made.append(built(name, targets, params, archs))
        except SpecError as error:
            refused += error.diagnostics
        except UsageError as error:
            usage(str(error))
    if refused:
        typer.echo(str(SpecError(refused)), err=True)
    if refused and (specs or not made):
        raise typer.Exit(1)
    refuse_same_names(made)
    if warn((one.spec for one in made), params) and strict:
        raise typer.Exit(1)
    for one in made:
        write(one, output)
    Console().print(summary([one.codec for one in made]))
    typer.echo(f"source and reports: {output}/")


def distinct(specs: list[str]) -> list[str]:
    """The specs, each file once."""
    files = dict[str, str]()
    for spec in specs:
        try:
            files.setdefault(os.path.realpath(library.locate(spec)), spec)
        except (SpecError, ValueError):  # building it reports the mistake
            files.setdefault(spec, spec)
    return list(files.values())


def refuse_same_names(specs: list[Built]) -> None:
    """Exit 2 if two specs have the same name, and so the same files."""
    owners = dict[str, str]()
    for one in specs:
        name = one.codec.name
        if owners.setdefault(name, one.spec) != one.spec:
            usage(f"{owners[name]} and {one.spec} are both named {name!r}: rename one")


def several(options: list[str] | None) -> list[str]:
    """The values of an option that may repeat or hold several values with commas; each value
    once."""
    texts = [text.strip() for item in options or [] for text in item.split(",")]
    return list(dict.fromkeys(filter(None, texts)))


@dataclass(frozen=True)
class Built:
    """A compiled spec, its name as given, and files by their endings."""

    spec: str
    codec: Codec
    files: dict[str, bytes]


def write(one: Built, folder: Path) -> None:
    """Write the files of a spec; or exit 2."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for ending, data in one.files.items():
            write_file(folder / f"{one.codec.name}.{ending}", data)
    except OSError as error:
        usage(f"cannot write {error.filename}: {error.strerror}")


def built(name: str, targets: list[str], params: dict[str, object], archs: list[str]) -> Built:
    """Compile for every target; source, binaries if asked for, and reports. Raises SpecError."""
    if archs and not set(targets) & set(artifacts.DEVICES):
        raise UsageError(f"--arch belongs to --target cuda, not {', '.join(targets)}")
    codecs, files = [], dict[str, bytes]()
    for target in targets:
        device = target in artifacts.DEVICES
        codec = library.compile(name, "reference" if device else target, **params)
        texts = artifacts.sources(target, codec.module, codec.params)
        texts |= artifacts.assembly(target, texts)
        files |= {ending: text.encode() for ending, text in texts.items()}
        kernels = dict[str, artifacts.Kernels]()
        for arch in archs if device else ():
            binaries = artifacts.binaries(target, texts, arch)
            files |= binaries.files
            kernels[arch] = binaries.kernels
        facts = json.dumps(report.facts(codec, target) | {"kernels": kernels}, indent=1) + "\n"
        which = f"{target}." if len(targets) > 1 else ""
        files[f"{which}report.json"] = facts.encode()
        files[f"{which}report.md"] = report.markdown(codec, target, kernels).encode()
        codecs.append(codec)
    return Built(name, codecs[0], files)


def summary(codecs: list[Codec]) -> Table:
    """Lines about a built spec: payload, passes, traffic."""
    table = Table(
        "name", "payload", "bits", "passes", "bytes moved", "least", box=None, pad_edge=False
    )
    for codec in codecs:
        parts = ", ".join(f"{p.name} {p.type}" for p in places(codec.module))
        found = explain.encode_traffic(codec.module)
        table.add_row(
            codec.name, escape(parts), f"{report.bits(codec):.4g}", str(len(found.passes)),
            f"{found.moved:.4g}", f"{found.least:.4g}",
        )  # fmt: skip
    return table


def main() -> None:
    """Run a command."""
    try:
        app()
    except CompllError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)
