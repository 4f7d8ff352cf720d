"""Refuses a wheel that lacks a file of its packages, and a source archive that lacks a file of git.

python .ci/archives.py dist
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

LEFT_OUT = (".ci/", ".gitignore", ".pre-commit-config.yaml")  # of the source archive
tracked = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout
files = [name for name in tracked.splitlines() if Path(name).is_file()]

(wheel,) = Path(sys.argv[1]).glob("hipress-*.whl")
inside = set(zipfile.ZipFile(wheel).namelist())
wanted = [name for name in files if name.startswith(("compll/", "casync/", "hipress/"))]
wanted += [f"compll/{name}" for name in files if name.startswith("specs/")]
missing = sorted({*wanted} - inside)

(archive,) = Path(sys.argv[1]).glob("hipress-*.tar.gz")
with tarfile.open(archive) as opened:
    names = {name.partition("/")[2] for name in opened.getnames()}
missing += sorted({name for name in files if not name.startswith(LEFT_OUT)} - names)
if missing:
    sys.exit(f"dist/ lacks {', '.join(missing)}")
print(f"{wheel.name}: {len(inside)} files; {archive.name}: {len(names)}")
