"""Commands for the author of a spec: new, schema, bench. `new` begins with the file of that kind in
templates/, a commented spec."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compll.errors import UsageError, nearest
from compll.files import write_file
from compll.frontend.sections import NAME, NAME_HINT
from compll.runtime import library
from compll.tools.cli_common import Params, SomeSpecs, Target, each, known_target, parameters, usage
from compll.tools.schema import schema as make_schema

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
    from compll.tools import bench_report, measure

    counts = [elements(size) for size in sizes.split(",")]
    params = parameters(param)
    known_target(target)
    writable(json_file)
    writable(plot)
    if plot and plot.suffix[1:].lower() not in (known := bench_report.formats()):
        usage(f"cannot write {plot}: a picture is one of {', '.join(sorted(known))}")
    codecs = each(
        specs or library.list_specs(), lambda name: library.compile(name, target, **params)
    )
    rows = [measure.measure(codec, n, repeat) for n in counts for codec in codecs]
    Console().print(bench_report.table(rows))
    try:
        if json_file:
            write_file(json_file, json.dumps(bench_report.data(rows), indent=1) + "\n")
        if plot:
            bench_report.plot(rows, plot)
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
