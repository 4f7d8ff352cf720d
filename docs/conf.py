"""Sphinx configuration of the documentation site: `make docs`."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import hipress
from compll.frontend.operators import OPERATORS
from compll.frontend.source import SECTIONS

DOCS = Path(__file__).parent
ELSEWHERE = {  # pages of the README that have another place on the site
    "CONTRIBUTING.md": "reference/contributing.md",
    "CHANGELOG.md": "reference/changes.md",
    "examples/": "../examples/",
}
COMMANDS = {"hipress": "hipress.tools.cli", "compll": "compll.tools.cli"}

project = "HiPress"
copyright = "the HiPress authors"
release = hipress.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
copybutton_exclude = ".linenos, .gp, .go"

suppress_warnings = ["ref.python"]  # Codec, of casync and of compll
default_role = "code"  # single backticks in docstrings
autodoc_typehints = "none"  # signatures would be longer than what they explain
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = f"HiPress {release}"
html_show_sphinx = False


def write_command_pages(folder: Path) -> None:
    """Write a page for each command line, as typer prints it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in COMMANDS.items():
        shim = folder / f"{name}_cli.py"  # typer wants a file that holds the app
        shim.write_text(f"from {module} import app\n")
        command = [sys.executable, "-m", "typer", str(shim), "utils", "docs", "--name", name]
        page = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (folder / f"{name}.md").write_text(page)


def write_language_tables(folder: Path) -> None:
    """Write tables of the sections of specs and of their operators, from the compiler's own."""
    operators = [(row.infix or row.name, row.about) for row in OPERATORS.values()]
    sections = [(row.name, row.about) for row in SECTIONS.values()]
    for name, rows in (("sections", sections), ("operators", operators)):
        cells = [[text.replace("|", "\\|") for text in row] for row in rows]
        lines = [f"| `{first}` | {about} |" for first, about in cells]
        text = "\n".join(["| name | meaning |", "|---|---|", *lines, ""])
        (folder / f"{name}.md").write_text(text)


write_command_pages(DOCS.parent / "build" / "commands")
write_language_tables(DOCS.parent / "build" / "commands")


def mend_links(_: Sphinx, *read: Any) -> None:
    """Lead links of the README to the site's pages, and leave Markdown outside docs/ as text."""
    content = read[-1]
    for there, here in ELSEWHERE.items():
        content[0] = content[0].replace(f"]({there}", f"]({here}")
    content[0] = re.sub(r"\]\(\.\./((?:\.\./)*)README\.md", r"](\1index.md", content[0])
    results = r"\[([^\]]+)\]\((?:\.\./)*(bench/results/\w+\.md)\)"
    content[0] = re.sub(results, r"\1 (`\2`)", content[0])


def setup(app: Sphinx) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("source-read", mend_links)
    app.connect("include-read", mend_links)
