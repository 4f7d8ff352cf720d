"""The scripts of docs/frameworks.md train, save and resume under each framework."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.walkthrough import BLOCK, follow, run, write

TEXT = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("framework", SECTIONS)
def test_its_script_trains_and_goes_on(framework, tmp_path, monkeypatch):
    package = "torch" if framework == "FSDP2" else framework.lower()
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(follow(SECTIONS[framework], tmp_path, errors=False)) == 2
    for rank in range(2):
        assert list(tmp_path.rglob(f"hipress*-{rank}.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("framework", SECTIONS)
def test_its_script_trains_with_one_process(framework, tmp_path, monkeypatch):
    package = "torch" if framework == "FSDP2" else framework.lower()
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ((kind, script),) = [each for each in BLOCK.findall(SECTIONS[framework]) if each[0] == "python"]
    write(kind, script, tmp_path)
    start = "python" if framework == "Lightning" else "torchrun --nproc-per-node 1"
    done = run(f"{start} with_{framework.lower()}.py alone", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step " in done.stdout
