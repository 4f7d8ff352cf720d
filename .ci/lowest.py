"""Prints the lowest versions that pyproject.toml allows, as constraints for pip; torch's aside."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for each in (*project["dependencies"], *extras["tools"], *extras["weights"]):
    name, least = re.fullmatch(r"([\w-]+)>=([\d.]+)", each).groups()
    if name != "torch":
        print(f"{name}=={least}")
