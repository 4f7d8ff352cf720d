"""Refuses docstrings that open with a relative clause: they describe a thing without naming it."""

import ast
import sys
from pathlib import Path

REFUSED = (
    "What Whether Of Where How One See Who Which When Why Whose Whom While So Such Those As By If "
    "That Once"
)
FOLDERS = ("bench", "casync", "compll", "examples", "hipress", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def refused(path: Path) -> list[str]:
    """Docstrings of a file to be rewritten, each as "path:line: text"."""
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, DOCUMENTED)]
    texts = [(n.body[0].lineno, text) for n in found if (text := ast.get_docstring(n))]
    return [f"{path}:{line}: {text}" for line, text in texts if opening(text) in REFUSED.split()]


def opening(text: str) -> str:
    """The first word, without punctuation."""
    return text.split(maxsplit=1)[0].strip(",.:;")


paths = [path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))]
if bad := [line for path in paths for line in refused(path)]:
    sys.exit("\n".join([*bad, 'Say the thing: "Tiles per block.", not "What a block has."']))
