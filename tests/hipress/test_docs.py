"""Each page of the documentation has an example that runs: Python in one pair of ranks, commands in
this process, specs and files of clusters through what reads them."""

import ast
import functools
import re
import shlex
import shutil
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import compll
from compll.tools import cli as compll_cli
from hipress import integrations
from hipress.tools import cli as hipress_cli
from hipress.tools.simulate import cluster
from tests.hipress import docs_ranks
from tests.hipress.launch import launch
from tests.walkthrough import commands, fits, follow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(
    r"(<!-- not run: [^\n]*-->\n)?^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE
)
APPS = {"hipress": hipress_cli.app, "compll": compll_cli.app}
#: pages that tests of their own run in full, and pages of which they run the scripts
WHOLE = {"docs/write/tutorial.md", "README.md"}
SCRIPTS = {"docs/start/cpu.md", "docs/use/frameworks.md"}
#: pages without examples: they include or list
LISTS = ("docs/reference/", "docs/index.md")


def blocks(page, kind, *, run=True):
    """The page's blocks of a kind, without those that are marked as not run."""
    found = BLOCK.findall(page.read_text("utf-8"))
    return [textwrap.dedent(b) for mark, _, k, b in found if k == kind and not (run and mark)]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def having(kind):
    """Pages with such blocks, which no other test runs as a whole."""
    return [p for p in PAGES if blocks(p, kind) and name_of(p) not in WHOLE]


@functools.cache
def errors_of_ranks():
    """Errors by page, of each rank. Ranks start once, for all pages."""
    pages = {}
    for page in PAGES:
        # a script with a name of its own is torchrun's to start
        python = [b for b in blocks(page, "python") if not re.match(r"# with_\w+\.py", b)]
        if python and name_of(page) not in WHOLE:
            pages[name_of(page)] = python
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in pages]
    given = {p: (store.port, pages[p]) for p, store in zip(pages, stores, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = launch(docs_ranks.run_pages, 2, folder, given)
        except AssertionError as error:  # no answer, of any page
            return {page: [str(error)] for page in pages}
    return {page: [each[page] for each in found if page in each] for page in pages}


@pytest.mark.xdist_group("pages")  # one worker, so that ranks start once
@pytest.mark.parametrize("page", having("python"), ids=name_of)
def test_its_python_runs(page):
    errors = errors_of_ranks().get(name_of(page), [])
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("page", having("console"), ids=name_of)
def test_its_commands_print_what_it_shows(page, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "console"):
        for command, expected in commands(block):
            program, *args = shlex.split(command)
            assert program in APPS or name_of(page) in SCRIPTS, f"no test runs $ {command}"
            if program in APPS:
                done = CliRunner(env={"COLUMNS": "200"}).invoke(APPS[program], args)
                assert done.exit_code == 0, f"$ {command}\n{done.output}"
                lines = "\n".join(line.rstrip() for line in done.output.splitlines())
                assert fits(lines, expected), f"$ {command}\n{lines}"


@pytest.mark.slow
def test_the_quick_start_as_written(tmp_path):
    page = (ROOT / "docs/start/cpu.md").read_text("utf-8")
    assert follow(page, tmp_path, errors=False) == ["torchrun"]


@pytest.mark.parametrize("page", having("yaml"), ids=name_of)
def test_its_files_are_read(page, tmp_path):
    for number, text in enumerate(blocks(page, "yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        if re.match("name: ", text):
            compll.compile(path, "reference")
        elif re.match("nodes: ", text):
            cluster.read(path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_it_has_an_example_that_runs(page):
    kinds = ("python", "console", "yaml")
    assert name_of(page).startswith(LISTS) or any(blocks(page, kind) for kind in kinds)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_that_is_not_run_compiles(page):
    for block in blocks(page, "python", run=False):
        ast.parse(block)


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
