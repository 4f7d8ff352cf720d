"""docs/tutorial.md is run as it stands: its files are written, its commands print what it says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text("utf-8")
BLOCK = re.compile(r"^```(yaml|python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = {
    "compll": (sys.executable, "-c", "from compll.cli import main; main()"),
    "pytest": (sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}


def blocks():
    return BLOCK.findall(TEXT)


def write(kind, text, folder):
    """A spec goes to NAME.yaml, a script to the file that its first line names."""
    pattern, ending = (r"name: (\w+)\n", ".yaml") if kind == "yaml" else (r"# (\S+)\n", "")
    (folder / (re.match(pattern, text)[1] + ending)).write_text(text)


def commands(text):
    """Each command of a console block, with the lines that it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output.strip("\n").split("\n") if output.strip() else []


def run(command, folder):
    program, *args = shlex.split(command)
    shell = program not in PROGRAMS
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    return subprocess.run(
        command if shell else [*PROGRAMS[program], *args],
        shell=shell, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip


def fits(printed, expected):
    """Whether the lines are as expected; `...` stands for anything."""
    pattern = "\n".join(re.escape(line.rstrip()) for line in expected).replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern, printed.strip("\n"), re.DOTALL)


@pytest.mark.skipif(shutil.which("sed") is None, reason="the tutorial edits with sed")
def test_the_tutorial(tmp_path):
    ran = []
    for kind, text in blocks():
        if kind != "console":
            write(kind, text, tmp_path)
            continue
        for command, expected in commands(text):
            done = run(command, tmp_path)
            printed = "\n".join(line.rstrip() for line in (done.stdout + done.stderr).splitlines())
            assert "Traceback" not in printed, printed
            assert (done.returncode == 0) != ("hint:" in printed), printed
            assert fits(printed, expected), f"$ {command}\n{printed}"
            ran.append(command.split()[0])
    assert set(PROGRAMS) <= set(ran)


def test_its_links_lead_somewhere():
    for name in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (Path(__file__).parents[2] / "docs" / name).is_file()
