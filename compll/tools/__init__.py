"""The command line: texts, figures and files about a spec."""

from compll.tools import extra


def main() -> None:
    """The entry point of the console script `compll`."""
    extra.run("compll", "compll.tools.cli")
