"""Documents whose files are written and whose commands are run unchanged."""

import os
import re
import shlex
import subprocess
import sys

from tests.patience import HANG

BLOCK = re.compile(r"^```(yaml|python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = {
    "compll": (sys.executable, "-c", "from compll.tools import main; main()"),
    "pytest": (sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
    "python": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}


def follow(text, folder, *, errors=True):
    """Follow a document: write its files and run its commands; returns the programs that ran.

    errors: include the commands' stderr in their output.
    """
    ran = []
    for kind, block in BLOCK.findall(text):
        if kind != "console":
            write(kind, block, folder)
            continue
        for command, expected in commands(block):
            done = run(command, folder)
            assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
            shown = done.stdout + (done.stderr if errors else "")
            printed = "\n".join(line.rstrip() for line in shown.splitlines())
            assert (done.returncode == 0) != ("hint:" in printed), printed
            assert fits(printed, expected), f"$ {command}\n{printed}"
            ran.append(command.split()[0])
    return ran


def write(kind, text, folder):
    """Write a block into a file: a spec to NAME.yaml, a script to the name in its first line."""
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
    """True if the lines are as expected; `...` stands for anything."""
    pattern = "\n".join(re.escape(line.rstrip()) for line in expected).replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern, printed.strip("\n"), re.DOTALL)
