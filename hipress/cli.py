"""The command line `hipress`. Each command lives in a module of its own; this one only lists
them."""

import typer

from hipress.demo.command import demo

app = typer.Typer(
    help="Compressed gradient synchronization for data-parallel PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)


@app.callback()
def _commands() -> None:
    # With a callback typer keeps a lone command's name on the command line.
    pass


def main() -> None:
    """The entry point of the console script."""
    app()
