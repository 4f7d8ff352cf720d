"""Text under construction, with indentation."""

from __future__ import annotations


class Lines:
    """Text under construction, with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def add(self, text: str) -> None:
        """One line at the present depth."""
        self.lines.append("  " * self.depth + text)

    def block(self, head: str) -> Block:
        """`with lines.block("for (...)"):` puts braces around what follows."""
        return Block(self, head)

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


class Block:
    """A pair of braces."""

    def __init__(self, lines: Lines, head: str) -> None:
        self.lines, self.head = lines, head

    def __enter__(self) -> None:
        self.lines.add(f"{self.head} {{".lstrip())
        self.lines.depth += 1

    def __exit__(self, *error: object) -> None:
        self.lines.depth -= 1
        self.lines.add("}")
