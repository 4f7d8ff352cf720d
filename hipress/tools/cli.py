"""The command line `hipress`. Each command has a module of its own; this one only lists them."""

from typing import Annotated

import typer

from hipress import __version__
from hipress.tools.bench_command import app as bench_app
from hipress.tools.bench_command import bench
from hipress.tools.plan_command import plan
from hipress.tools.probe_command import probe
from hipress.tools.simulate_command import simulate
from hipress.tools.trace_command import trace

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(
    "demo", help="hipress bench --quick.", context_settings={"default_map": {"quick": True}}
)(bench)
app.command("probe")(probe)
app.command("plan")(plan)
app.add_typer(bench_app, name="bench")
app.command("simulate")(simulate)
app.command("trace")(trace)


def show_version(wanted: bool) -> None:
    """Print the version and exit, if asked to."""
    if wanted:
        typer.echo(f"hipress {__version__}")
        raise typer.Exit


@app.callback()  # with one, typer keeps a lone command's name on the command line
def hipress(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    """Compressed gradient synchronization for data-parallel PyTorch training."""


def main() -> None:
    """Run a command."""
    app()


if __name__ == "__main__":
    main()
