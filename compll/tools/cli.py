"""The command line `compll`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from compll import __version__
from compll.errors import CompllError, Diagnostic, Span, SpecError, UsageError, nearest
from compll.files import write_file, write_json
from compll.frontend import source
from compll.frontend.source import NAME, NAME_HINT
from compll.passes import lower
from compll.runtime import library
from compll.runtime.codec import Codec
from compll.tools import explain
from compll.tools.explain import places
from compll.tools.schema import schema as make_schema

# ---- cli common ---------------------------------------------------------------------------------
# Common parts of the commands of `compll`: arguments, parameters, one-line errors.

Made = TypeVar("Made")
Specs = Annotated[list[str], typer.Argument(help="names of specs, or paths of YAML files")]
SomeSpecs = Annotated[
    list[str] | None, typer.Argument(help="names of specs, or paths; all if none is given")
]
Params = Annotated[
    list[str] | None, typer.Option("--param", "-p", help="a parameter, as name=value")
]
Strict = Annotated[bool, typer.Option("--strict", help="exit with 1 if there are warnings")]
Target = Annotated[str, typer.Option(help="the backend: cpu, cuda or reference")]


def usage(message: str) -> NoReturn:
    """Report a mistake on the command line: one line, exit status 2."""
    typer.echo(f"compll: {message}", err=True)
    raise typer.Exit(2)


def parameters(options: list[str] | None) -> dict[str, object]:
    """Parameters from `name=value` texts."""
    result: dict[str, object] = {}
    for item in options or []:
        name, equals, value = item.partition("=")
        if not (equals and name.isidentifier()):
            usage(f"parameter {item!r}: expected name=value")
        if name in result:
            usage(f"parameter {name!r} is given twice")
        result[name] = source.scalar(source.Text(value, Span()))
    return result


def known_target(target: str) -> str:
    """The target, or exit 2."""
    if target not in library.backends():
        hint = nearest(target, library.backends())
        usage(f"no backend {target!r}: {hint}")
    return target


def each(names: Iterable[str], make: Callable[[str], Made]) -> list[Made]:
    """make(name) for every spec; or exit 1 after all of them, with every diagnostic of each."""
    made, wrong = list[Made](), list[Diagnostic]()
    for name in names:
        try:
            made.append(make(name))
        except SpecError as error:
            wrong += error.diagnostics
        except UsageError as error:
            usage(str(error))
    if wrong:
        typer.echo(str(SpecError(wrong)), err=True)
        raise typer.Exit(1)
    return made


def warn(names: Iterable[str], params: dict[str, object]) -> int:
    """Print warnings about specs that compile; returns their number."""
    diagnostics = [w for name in dict.fromkeys(names) for w in library.warnings(name, params)]
    for warning in diagnostics:
        typer.echo(str(warning), err=True)
    return len(diagnostics)


def compiled(name: str, target: str, params: dict[str, object]) -> Codec:
    """A codec; or exit 1 with all diagnostics of a wrong spec, 2 for a backend that is not
    available."""
    known_target(target)
    return each([name], lambda name: library.compile(name, target, **params))[0]


# ---- cli author ---------------------------------------------------------------------------------
# Commands for the author of a spec: new, schema, bench. `new` begins with the file of that kind
# in templates/, a commented spec.

FOLDER = Path(__file__).with_name("templates")


def kinds() -> list[str]:
    """Kinds of compressors that have a template."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def start(name: str, kind: str, folder: Path) -> Path:
    """Write folder/NAME.yaml and return its path. Raises UsageError, never overwrites."""
    if not NAME.match(name):
        raise UsageError(f"{name!r} is no name for a spec: {NAME_HINT} (and no .yaml)")
    if kind not in kinds():
        raise UsageError(f"no kind {kind!r}: {nearest(kind, kinds())}")
    if name in library.list_specs():
        raise UsageError(f"{name!r} comes with the package already: choose another name")
    path = folder / f"{name}.yaml"
    text = (FOLDER / f"{kind}.yaml").read_text("utf-8").replace("NAME", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            raise UsageError(f"{path} exists, and is left as it is")
        write_file(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path


def new(
    name: Annotated[str, typer.Argument(help="the compressor's name; NAME.yaml is written")],
    kind: Annotated[str, typer.Option(help=", ".join(kinds()))] = "quantizer",
    output: Annotated[Path, typer.Option("--output", "-o", help="folder")] = Path(),
) -> None:
    """Begin a spec: a commented file that compiles as it is."""
    try:
        path = start(name, kind, output)
    except UsageError as error:
        usage(str(error))
    typer.echo(f"{path} written; next: compll check {path}")


def schema() -> None:
    """Print a JSON Schema of spec files, for completion in editors."""
    typer.echo(json.dumps(make_schema(), indent=1))


def bench(
    specs: SomeSpecs = None,
    sizes: Annotated[str, typer.Option(help="elements, like 100k,1M")] = "10k,1M,12M",
    repeat: Annotated[int, typer.Option(min=1, help="timed turns; the median counts")] = 9,
    param: Params = None,
    target: Target = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file to write")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="roofline chart to write: .png, .svg, .pdf")
    ] = None,
) -> None:
    """Measure encode, decode, decode-add and merge against the copy bandwidth of this machine."""
    from compll.tools import measure

    counts = [elements(size) for size in sizes.split(",")]
    params = parameters(param)
    known_target(target)
    writable(json_file)
    writable(plot)
    if plot and plot.suffix[1:].lower() not in (formats := measure.formats()):
        usage(f"cannot write {plot}: a picture is one of {', '.join(sorted(formats))}")
    codecs = each(
        specs or library.list_specs(), lambda name: library.compile(name, target, **params)
    )
    rows = [measure.measure(codec, n, repeat) for n in counts for codec in codecs]
    Console().print(measure.table(rows))
    try:
        if json_file:
            write_json(json_file, measure.data(rows))
        if plot:
            measure.plot(rows, plot)
    except (OSError, ValueError) as error:
        usage(f"cannot write {json_file if plot is None else plot}: {error}")


def writable(path: Path | None) -> None:
    """Exit 2 if `path` cannot be written: before an hour of measuring, not after."""
    if path is None or (path.exists() and not (path.is_file() or path.is_dir())):
        return  # a pipe or device: even opening it has effects
    real = Path(os.path.realpath(path))
    new = not real.exists()
    try:
        real.open("ab").close()
        if new:
            real.unlink()
    except (OSError, ValueError) as error:
        usage(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")


def elements(text: str) -> int:
    """The number of elements in a text such as 4096, 100k or 1.5M; or exit 2."""
    number = text.strip().lower().rstrip("km")
    scale = {"k": 10**3, "m": 10**6}.get(text.strip()[-1:].lower(), 1)
    try:
        count = int(float(number) * scale)
    except (ValueError, OverflowError):
        count = 0
    if not 1 <= count <= 1 << 31:
        usage(f"size {text!r}: expected a number of elements, like 4096, 100k or 1M")
    return count


# ---- cli ----------------------------------------------------------------------------------------

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


for command in (new, schema, bench):
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
        table.add_row(name, f"{explain.bits(codec):.4g}", codec.module.about)
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
    if warn((output_of.spec for output_of in made), params) and strict:
        raise typer.Exit(1)
    for output_of in made:
        write(output_of, output)
    Console().print(summary([output_of.codec for output_of in made]))
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
    for spec in specs:
        name = spec.codec.name
        if owners.setdefault(name, spec.spec) != spec.spec:
            usage(f"{owners[name]} and {spec.spec} are both named {name!r}: rename one")


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


def write(built: Built, folder: Path) -> None:
    """Write the files of a spec; or exit 2."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for ending, data in built.files.items():
            write_file(folder / f"{built.codec.name}.{ending}", data)
    except OSError as error:
        usage(f"cannot write {error.filename}: {error.strerror}")


def built(name: str, targets: list[str], params: dict[str, object], archs: list[str]) -> Built:
    """Compile for every target; source, binaries if asked for, and reports. Raises SpecError."""
    if archs and not set(targets) & set(explain.DEVICES):
        raise UsageError(f"--arch belongs to --target cuda, not {', '.join(targets)}")
    codecs, files = [], dict[str, bytes]()
    for target in targets:
        device = target in explain.DEVICES
        codec = library.compile(name, "reference" if device else target, **params)
        texts = explain.sources(target, codec.module, codec.params)
        texts |= explain.assembly(target, texts)
        files |= {ending: text.encode() for ending, text in texts.items()}
        kernels = dict[str, explain.Kernels]()
        for arch in archs if device else ():
            binaries = explain.binaries(target, texts, arch)
            files |= binaries.files
            kernels[arch] = binaries.kernels
        facts = json.dumps(explain.facts(codec, target) | {"kernels": kernels}, indent=1) + "\n"
        which = f"{target}." if len(targets) > 1 else ""
        files[f"{which}report.json"] = facts.encode()
        files[f"{which}report.md"] = explain.markdown(codec, target, kernels).encode()
        codecs.append(codec)
    return Built(name, codecs[0], files)


def summary(codecs: list[Codec]) -> Table:
    """Lines about a built spec: payload, passes, traffic."""
    table = Table(
        "name", "payload", "bits", "passes", "bytes moved", "least", box=None, pad_edge=False
    )
    for codec in codecs:
        parts = ", ".join(f"{p.name} {p.type}" for p in places(codec.module))
        traffic = explain.encode_traffic(codec.module)
        table.add_row(
            codec.name, escape(parts), f"{explain.bits(codec):.4g}", str(len(traffic.passes)),
            f"{traffic.moved:.4g}", f"{traffic.least:.4g}",
        )  # fmt: skip
    return table


def main() -> None:
    """Run a command."""
    try:
        app()
    except CompllError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)
