"""`compll new`: a commented spec to begin with, from the file of that kind in templates/."""

from __future__ import annotations

from pathlib import Path

from compll.errors import UsageError, nearest
from compll.frontend.sections import NAME, NAME_HINT
from compll.runtime.library import list_specs

FOLDER = Path(__file__).with_name("templates")


def kinds() -> list[str]:
    """Kinds of compressors that have a template."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def start(name: str, kind: str, folder: Path) -> Path:
    """Write folder/NAME.yaml and return its path. Raises UsageError, never overwrites."""
    if not NAME.match(name):
        raise UsageError(f"{name!r} is no name for a spec: {NAME_HINT} (and no .yaml)")
    if kind not in kinds():
        raise UsageError(f"no kind {kind!r}: {nearest(kind, kinds())}")
    if name in list_specs():
        raise UsageError(f"{name!r} comes with the package already: choose another name")
    path = folder / f"{name}.yaml"
    text = (FOLDER / f"{kind}.yaml").read_text("utf-8").replace("NAME", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists, and is left as it is") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path
