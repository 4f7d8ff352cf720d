"""README.md is correct and short: its script trains, its spec compiles, and its links exist."""

import re
import shutil
from pathlib import Path

import pytest

import compll
from casync import strategies
from casync.strategies import HALVES, load
from hipress import options
from tests.walkthrough import follow, write

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench" / "results" / "README.md"]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


@pytest.mark.slow
def test_its_script_trains_before_any_benchmark(tmp_path):
    head, _, script = README.partition("A complete script is")
    script, speed, _ = script.partition("## Is it faster?")
    assert speed, "the README has no script, or no step times after it"
    assert "| --- |" not in head
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    assert follow(script, tmp_path, errors=False) == ["torchrun"]


def test_its_spec_compiles(tmp_path):
    (spec,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    write("yaml", spec, tmp_path)
    codec = compll.compile(tmp_path / "signs.yaml", "reference")
    assert codec.payload_bytes(2048) == 2 * 4 + 2048 // 8


def test_it_is_read_in_a_few_minutes():
    assert len(README.splitlines()) <= 115


def test_options_and_strategies_are_those_described():
    described = first_cells("Options of `wrap` and `attach`")
    whole = {s for s in strategies.list_strategies() if load(s).RESULT not in HALVES}
    assert described == {*options.names(), "compressor", *whole}


def first_cells(heading):
    """Texts between backquotes in the first column of a section's tables."""
    told = (ROOT / "docs" / "use.md").read_text("utf-8")
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
