"""README.md is correct: its commands and lines of Python train, and its links exist."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from casync import strategies
from casync.strategies import HALVES, load
from hipress import options
from tests.walkthrough import follow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/results/*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


GIVEN = """
import torch
import torch.distributed as dist
import hipress

dist.init_process_group("gloo")
model, x = torch.nn.Linear(512, 64), torch.randn(8, 512)
"""


def test_it_can_be_read_at_once():
    lines = README.splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if len(line) > 160 and not line.startswith("|")] == []


@pytest.mark.slow
def test_its_commands_train(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    *_, script = README.partition("A complete script is")
    assert follow(script, tmp_path, errors=False) == ["torchrun"]


@pytest.mark.slow
def test_its_lines_of_python_train(tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    passes = block.replace("loss.backward()", "loss = model(x).square().mean()\nloss.backward()")
    (tmp_path / "script.py").write_text(GIVEN + passes)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["hipress-0.pt", "hipress-1.pt"]


def test_options_and_strategies_are_those_described():
    described = first_cells("Options of `wrap` and `attach`")
    whole = {s for s in strategies.list_strategies() if load(s).RESULT not in HALVES}
    ours = {each.name for each in fields(options.Options)}
    assert described == ours | whole


def first_cells(heading):
    """Texts between backquotes in the first column of a section's tables."""
    told = (ROOT / "docs" / "use" / "wrap.md").read_text("utf-8")
    section = told.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall("`([^`]*)`", cell)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text("utf-8")
    for name, heading in LINK.findall(text):
        target = (page.parent / name) if name else page
        assert target.exists(), name
        if heading:
            assert heading in anchors(target.read_text("utf-8")), f"{name}#{heading}"


def anchors(text):
    """Anchors of headings, as GitHub names them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
