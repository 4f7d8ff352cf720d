"""Names the platforms of a wheel, so that pip refuses it elsewhere.

It has no compiled code: kernels are compiled where they run, for these alone. The tests run on
x86-64.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLATFORMS = "manylinux_2_17_x86_64.manylinux_2_17_aarch64"


class Platforms(BuildHookInterface):  # type: ignore[misc]
    """Sets the tag of wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: standard or editable."""
        build_data["tag"] = f"py3-none-{PLATFORMS}"
