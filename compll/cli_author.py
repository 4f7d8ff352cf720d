"""Commands for the author of a spec: new, schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from compll import scaffold
from compll.cli_common import usage
from compll.errors import UsageError
from compll.schema import schema as make_schema


def new(
    name: Annotated[str, typer.Argument(help="the compressor's name; NAME.yaml is written")],
    kind: Annotated[str, typer.Option(help=", ".join(scaffold.kinds()))] = "quantizer",
    output: Annotated[Path, typer.Option("--output", "-o", help="folder")] = Path(),
) -> None:
    """Begin a spec: a commented file that compiles as it is."""
    try:
        path = scaffold.start(name, kind, output)
    except UsageError as error:
        usage(str(error))
    typer.echo(f"{path} written; next: compll check {path}")


def schema() -> None:
    """Print a JSON Schema of spec files, for completion in editors."""
    typer.echo(json.dumps(make_schema(), indent=1))
