"""Every Python block of the documentation compiles; tests of single pages run those with output."""

import ast
import builtins
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


#: modules that every script imports, and names of the reader's own
GIVEN = (
    "hipress compll torch dist model ddp optimizer loss criterion batches Net MyModel load_batch "
    "tensor tensors choices codecs bucket states executor x step local_rank replicas shards sites "
    "ranks host"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_python_imports_what_is_not_the_readers(page):
    """A block can be copied: `fully_shard` once had to be looked for in torch."""
    known = {*GIVEN.split(), *dir(builtins)}
    for _, block in BLOCK.findall(page.read_text("utf-8")):
        used = set()
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
            elif isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
        assert used <= known, block


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
