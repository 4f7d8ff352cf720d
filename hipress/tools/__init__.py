"""Commands that measure, predict or show, and the command line `hipress` that lists them.

Nothing else of the package imports this one, whose libraries are those of the extra `tools`.
"""

from compll.tools import run


def main() -> None:
    """The entry point of the console script `hipress`."""
    run("hipress", "hipress.tools.cli")
