"""Every Python block of the documentation compiles; tests of single pages run those with output."""

import re
import textwrap
from pathlib import Path

import pytest

from hipress import integrations

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_python_compiles(page):
    for _, block in BLOCK.findall(page.read_text("utf-8")):
        compile(textwrap.dedent(block), str(page), "exec")


class Writer:
    """TensorBoard's interface, or that of W&B and Lightning."""

    def __init__(self, name):
        self.got = {}
        setattr(self, name, getattr(self, f"_{name}"))

    def _add_scalar(self, name, value, step):
        self.got[name] = value

    def _log(self, values, step):
        self.got |= values


@pytest.mark.parametrize("name", ["add_scalar", "log"])
def test_figures_go_to_each_kind_of_writer(name, monkeypatch):
    figures = {"hipress/bytes": 3.0}
    monkeypatch.setattr(integrations, "scalars", lambda model: figures)
    writer = Writer(name)
    integrations.write(writer, None, 7)
    assert writer.got == figures
