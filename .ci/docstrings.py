"""Refuses docstrings that open with a relative clause: they describe a thing without naming it."""

import ast
import sys
from pathlib import Path

REFUSED = (
    "What Whether Of Where How One See Who Which When Why Whose Whom While So Such Those As By If "
    "That Once"
)
#: folders that hold the rule; it grows to all of them
CLEAN = (
    "bench",
    "bench/published",
    "casync",
    "casync/graph",
    "casync/memory",
    "casync/nccl",
    "casync/predict",
    "casync/runtime",
    "casync/strategies",
    "casync/transports",
    "compll",
    "compll/backends",
    "compll/backends/cpu",
    "compll/backends/cuda",
    "compll/backends/reference",
    "compll/frontend",
    "compll/ir",
    "compll/numerics",
    "compll/passes",
    "compll/runtime",
    "compll/tools",
    "examples",
    "hipress",
    "hipress/adapters",
    "hipress/bench",
    "hipress/demo",
    "hipress/models",
    "hipress/optim",
    "hipress/plan",
    "hipress/ranks",
    "hipress/reporting",
    "hipress/simulate",
    "hipress/sync",
    "hipress/tracing",
    "tests",
    "tests/bench",
    "tests/casync",
    "tests/cluster",
    "tests/compll",
    "tests/compll/cuda_host",
    "tests/demo",
    "tests/hipress",
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def refused(path: Path) -> list[str]:
    """Docstrings of a file to be rewritten, each as "path:line: text"."""
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, DOCUMENTED)]
    texts = [(n.body[0].lineno, text) for n in found if (text := ast.get_docstring(n))]
    return [f"{path}:{line}: {text}" for line, text in texts if opening(text) in REFUSED.split()]


def opening(text: str) -> str:
    """The first word, without punctuation."""
    return text.split(maxsplit=1)[0].strip(",.:;")


paths = [path for folder in CLEAN for path in sorted(Path(folder).glob("*.py"))]
if bad := [line for path in paths for line in refused(path)]:
    sys.exit("\n".join([*bad, 'Say the thing: "Tiles per block.", not "What a block has."']))
