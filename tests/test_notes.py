"""Notes, files and folders that comments and pages refer to exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "casync", "compll", "hipress", "tests")
ENDINGS = (".py", ".cuh", ".h")
FILES = [p for d in PACKAGES for p in (ROOT / d).rglob("*") if p.suffix in ENDINGS]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
NOTE = r"Note: ([^\]()]+?)"
HEAD = re.compile(rf'^(?:\W*"""|[\s#/*]*)\[{NOTE}\] (?!in [\w`/]+\.)', re.MULTILINE)
REFERENCE = re.compile(rf"(?:\[{NOTE}\]|\({NOTE}(?= in `))(?:[\s#/]+in[\s#/]+`?([\w./]+\.\w+))?")
NAMED = re.compile(r"`((?:bench|casync|compll|docs|hipress|specs|tests)/[\w./]+)`")
TEMPLATE = re.compile(r"\bNAME\b")


def heads(path):
    """Names of the notes that a file holds."""
    return HEAD.findall(path.read_text("utf-8"))


HEADS = {path: found for path in FILES if (found := heads(path))}


def stale(path):
    """References of a file to notes that are not in the file that they name, or in no file."""
    for bracketed, bare, file in REFERENCE.findall(path.read_text("utf-8")):
        name = re.sub(r"[\s#]+", " ", bracketed or bare)
        holders = [p.as_posix() for p, names in HEADS.items() if name in names]
        if not any(p.endswith("/" + file if file else "") for p in holders):
            yield f"{path.relative_to(ROOT)}: [Note: {name}] is not in {file or 'any file'}"


def test_references_lead_to_notes():
    assert len(HEADS) > 20
    paths = [p for p in (*FILES, *PAGES) if p != Path(__file__)]
    assert not [line for path in paths for line in stale(path)]


def test_a_note_is_in_one_file():
    counts = Counter(name for names in HEADS.values() for name in names)
    assert not [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_folders_that_a_page_names_exist(page):
    names = [n for n in NAMED.findall(page.read_text("utf-8")) if not TEMPLATE.search(n)]
    assert not [n for n in names if not (ROOT / n).exists()]


def test_a_file_name_of_hipress_is_used_once():
    names = Counter(p.name for p in (ROOT / "hipress").rglob("*.py") if p.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_the_architecture_page_has_a_row_for_every_folder():
    page, told = (ROOT / "docs" / "how" / "design.md").read_text("utf-8"), set[str]()
    for cell in re.findall(r"^\| `((?:casync|hipress)/.*?)` \|", page, re.MULTILINE):
        first, *more = cell.split("`, `")
        told |= {first, *(f"{Path(first).parent}/{name}" for name in more)}
    packages = [
        file.parent for d in ("casync", "hipress") for file in ROOT.glob(f"{d}/*/__init__.py")
    ]
    assert told == {str(folder.relative_to(ROOT)) for folder in packages}
