"""The command line: texts, figures and files about a spec. It needs the libraries of the extra
`tools`."""

from __future__ import annotations

import sys
from importlib import import_module

LIBRARIES = ("jinja2", "matplotlib", "rich", "typer")
INSTALL = "pip install 'hipress[tools]'"


def run(program: str, module: str) -> None:
    """Run `main` of the module, or exit with a line on the extra if it is not installed."""
    try:
        import_module(module).main()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LIBRARIES:
            raise
        sys.exit(f"{program}: needs {missing}, of the extra `tools`: {INSTALL}")


def main() -> None:
    """The entry point of the console script `compll`."""
    run("compll", "compll.tools.cli")
