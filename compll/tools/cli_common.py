"""Common parts of the commands of `compll`: arguments, parameters, one-line errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, NoReturn, TypeVar

import typer

from compll.errors import Diagnostic, Span, SpecError, UsageError, nearest
from compll.frontend import source
from compll.runtime import library
from compll.runtime.codec import Codec

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
    found: dict[str, object] = {}
    for item in options or []:
        name, equals, value = item.partition("=")
        if not (equals and name.isidentifier()):
            usage(f"parameter {item!r}: expected name=value")
        if name in found:
            usage(f"parameter {name!r} is given twice")
        found[name] = source.scalar(source.Text(value, Span()))
    return found


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
    found = [w for name in dict.fromkeys(names) for w in library.warnings(name, params)]
    for warning in found:
        typer.echo(str(warning), err=True)
    return len(found)


def compiled(name: str, target: str, params: dict[str, object]) -> Codec:
    """A codec; or exit 1 with all diagnostics of a wrong spec, 2 for a backend that is not
    available."""
    known_target(target)
    return each([name], lambda name: library.compile(name, target, **params))[0]
