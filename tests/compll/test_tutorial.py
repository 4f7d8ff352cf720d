"""docs/write/tutorial.md runs as written: its files are made, its commands print what it shows."""

import shutil
from pathlib import Path

import pytest

from tests.walkthrough import follow

TEXT = (Path(__file__).parents[2] / "docs" / "write" / "tutorial.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("sed") is None, reason="the tutorial edits with sed")
def test_the_tutorial(tmp_path):
    assert {"compll", "pytest", "torchrun"} <= set(follow(TEXT, tmp_path))
