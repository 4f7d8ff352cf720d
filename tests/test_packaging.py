"""Extras, versions and the changelog agree with one another."""

import re
import tomllib
from pathlib import Path

import compll
import hipress

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def names(extra):
    return {re.match(r"[\w-]+", each)[0] for each in EXTRAS[extra]}


def test_frameworks_are_an_extra_of_their_own():
    """They take a gigabyte, and few tests need them."""
    frameworks = {"accelerate", "lightning", "transformers", "ray", "submitit"}
    assert names("frameworks") == frameworks
    assert not frameworks & set().union(*(names(each) for each in EXTRAS if each != "frameworks"))
    assert "'.[dev,frameworks]'" in (ROOT / "Makefile").read_text("utf-8")


def test_there_is_one_version_and_the_changelog_has_it():
    written = [
        path.relative_to(ROOT)
        for package in ("compll", "casync", "hipress")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^__version__ = ", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert written == [Path("compll/__init__.py")]
    assert hipress.__version__ == compll.__version__
    releases = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert releases[0] == "Unreleased"
    assert releases[1].partition(",")[0] == hipress.__version__


def test_each_lower_bound_can_be_tested():
    """`.ci/lowest.py` prints them as exact versions."""
    for each in (*PROJECT["dependencies"], *EXTRAS["tools"]):
        assert re.fullmatch(r"[\w-]+>=[\d.]+", each), each
