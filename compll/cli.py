"""The command line `compll`: list, check, explain, build."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compll import explain, library, source
from compll.codec import Codec
from compll.errors import CompllError, Diagnostic, Span, SpecError
from compll.passes import traffic

app = typer.Typer(
    help="Gradient compressors from YAML specs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Specs = Annotated[list[str], typer.Argument(help="names of specs, or paths of YAML files")]
Params = Annotated[
    list[str] | None, typer.Option("--param", "-p", help="a parameter, as name=value")
]
Target = Annotated[str, typer.Option(help="the backend")]


def usage(message: str) -> NoReturn:
    """A mistake on the command line: one line, exit status 2."""
    typer.echo(f"compll: {message}", err=True)
    raise typer.Exit(2)


def parameters(given: list[str] | None) -> dict[str, object]:
    """`name=value` texts as parameters."""
    found: dict[str, object] = {}
    for item in given or []:
        name, equals, value = item.partition("=")
        if not (equals and name.isidentifier()):
            usage(f"parameter {item!r}: expected name=value")
        found[name] = source.scalar(source.Text(value, Span()))
    return found


def compiled(name: str, target: str, params: dict[str, object]) -> Codec:
    """A codec, or exit: 1 with all diagnostics of a wrong spec, 2 for an unknown backend."""
    if target not in library.backends():
        usage(f"no backend {target!r}; there are: {', '.join(library.backends())}")
    try:
        return library.compile(name, target, **params)
    except SpecError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@app.command("list")
def list_() -> None:
    """The compressors that come with the package."""
    table = Table("name", "bits", "group", "keeps", "optimizers", "about", box=None, pad_edge=False)
    for name in library.list_specs():
        module, params = library.type_check(name, {})
        codec = library.compile(name, "reference", **params)
        kept = ", ".join(s.name for s in module.states) or "-"
        group = str(module.group or "-")
        table.add_row(
            name, f"{explain.bits(codec):.4g}", group, kept, module.optimizers, module.about
        )
    Console(soft_wrap=False).print(table)


@app.command()
def check(specs: Specs, param: Params = None) -> None:
    """Check specs; every problem of every file is reported at once."""
    params, found = parameters(param), list[Diagnostic]()
    for name in specs:
        try:
            library.type_check(name, params)
        except SpecError as error:
            found += error.diagnostics
    if found:
        typer.echo(str(SpecError(found)), err=True)
        raise typer.Exit(1)
    typer.echo(f"{len(specs)} checked, no problems")


@app.command("explain")
def explain_(
    spec: Annotated[str, typer.Argument(help="name of a spec, or path of a YAML file")],
    param: Params = None,
    stage: Annotated[
        list[str] | None, typer.Option(help=f"one of {', '.join(explain.STAGES)}; may repeat")
    ] = None,
    target: Target = "cpu",
) -> None:
    """Show each stage of the compiler, and the memory traffic."""
    stages = stage or [s for s in explain.STAGES if s != "source"]
    unknown = [s for s in stages if s not in explain.STAGES]
    if unknown:
        usage(f"no stage {unknown[0]!r}; there are: {', '.join(explain.STAGES)}")
    codec = compiled(spec, target, parameters(param))
    parsed = library.load(spec)
    for name in stages:
        if len(stages) > 1:
            typer.echo(f"\n--- {name}")
        typer.echo(explain.stage(name, parsed, codec))


@app.command()
def build(
    specs: Annotated[list[str] | None, typer.Argument(help="specs; all when none is named")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder")] = Path("compll-out"),
    param: Params = None,
    target: Target = "cpu",
) -> None:
    """Compile specs; write the generated source and a report of each."""
    codecs = [compiled(name, target, parameters(param)) for name in specs or library.list_specs()]
    try:
        output.mkdir(parents=True, exist_ok=True)
        for codec in codecs:
            write(codec, output)
    except OSError as error:
        usage(f"cannot write to {output}: {error.strerror}")
    Console().print(summary(codecs))
    typer.echo(f"source and reports: {output}/")


def write(codec: Codec, folder: Path) -> None:
    """NAME.TARGET.py, NAME.report.json and NAME.report.md."""
    (folder / f"{codec.name}.{codec.target}.py").write_text(explain.source(codec))
    report = json.dumps(explain.report(codec), indent=1)
    (folder / f"{codec.name}.report.json").write_text(report + "\n")
    (folder / f"{codec.name}.report.md").write_text(explain.markdown(codec))


def summary(codecs: list[Codec]) -> Table:
    """What was built: payload, passes, traffic."""
    table = Table(
        "name", "payload", "bits", "passes", "bytes moved", "least", box=None, pad_edge=False
    )
    for codec in codecs:
        places = ", ".join(f"{p.name} {p.type}" for p in explain.places(codec.module))
        found = traffic(explain.program_of(codec.module))
        table.add_row(
            codec.name, escape(places), f"{explain.bits(codec):.4g}", str(len(found.passes)),
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
