"""Training, and its report, need none of the libraries of the commands (the extra `tools`)."""

import subprocess
import sys
from pathlib import Path

import pytest

from compll.tools import LIBRARIES
from hipress.reporting.text_table import WIDTH, Table
from tests.patience import HANG
from tests.tiers import first_fast

ROOT = Path(__file__).parents[2]
ABSENT = f"import runpy, sys; sys.modules.update(dict.fromkeys({LIBRARIES}))\n"


def run(program):
    command = [sys.executable, "-c", ABSENT + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)


@pytest.mark.slow
def test_an_example_trains_and_prints_its_report_without_them(monkeypatch):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    done = run("runpy.run_path('examples/train.py')")
    assert done.returncode == 0, done.stderr
    assert "hipress, rank 0 of 1" in done.stdout


@pytest.mark.parametrize("program", first_fast(["compll", "hipress"]))
def test_a_command_names_the_extra_in_a_line(program):
    done = run(f"runpy.run_module({program!r}, run_name='__main__')")  # python -m
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}: needs typer")
    assert "pip install 'hipress[tools]'" in line


def test_a_table_fits_a_line_and_loses_no_word():
    table = Table("Plan", caption="word " * 40)
    table.add_columns(["codec", "why"], ["elements"])
    table.add_row("int4_group", "it pays " * 30, "1,024")
    table.add_row("none", "[small]", "8")
    text = str(table)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("pays") == 30
    assert text.count("word") == 40
    assert "[small]" in text
    elements = [line for line in text.splitlines() if line.endswith(("1,024", "  8"))]
    assert len({len(line) for line in elements}) == 1, text
