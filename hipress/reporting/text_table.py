"""Tables as plain text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

__all__ = ["WIDTH", "Table"]

WIDTH = 110  # characters of a line


class Table:
    """A title, rows of texts and numbers in aligned columns, and a caption."""

    def __init__(self, title: str, caption: str = "") -> None:
        self.title, self.caption = title, caption
        self._columns: list[tuple[str, str]] = []  # names and alignments
        self._rows: list[Sequence[str]] = []

    def add_columns(self, texts: Sequence[str], numbers: Sequence[str] = ()) -> None:
        """Add columns: texts stand on the left, numbers on the right."""
        self._columns += [(name, "<") for name in texts] + [(name, ">") for name in numbers]

    def add_row(self, *cells: str) -> None:
        """Add a row, with a cell for each column."""
        self._rows.append(cells)

    def __str__(self) -> str:
        return self.text(WIDTH)

    def print(self) -> None:
        """Print it as wide as the terminal is; piped, WIDTH wide."""
        print(self.text(shutil.get_terminal_size((WIDTH, 0)).columns))

    def text(self, width: int) -> str:
        """The table in lines of at most `width` characters, if its longest words fit."""
        widths = self._widths(width)
        rule = ["-" * width for width in widths]
        lines = [
            *textwrap.wrap(self.title, width),
            *self._lines([name for name, _ in self._columns], widths),
        ]
        for row in (rule, *self._rows):
            lines += self._lines(row, widths)
        return "\n".join([*lines, *textwrap.wrap(self.caption, width)])

    def _widths(self, width: int) -> list[int]:
        """Widths of the columns, of which the widest give way until a line fits; but no word, and
        so no figure, is cut."""
        columns = [*zip([name for name, _ in self._columns], *self._rows, strict=True)]
        widths = [max(map(len, cells)) for cells in columns]
        least = [
            max(len(word) for cell in cells for word in (cell.split() or [""])) for cells in columns
        ]
        while sum(widths) + 2 * (len(widths) - 1) > width:
            give = [i for i, each in enumerate(widths) if each > least[i]]
            if not give:
                break
            widths[max(give, key=widths.__getitem__)] -= 1
        return widths

    def _lines(self, cells: Sequence[str], widths: Sequence[int]) -> list[str]:
        """A row's lines: a cell that is longer than its column is wide is wrapped."""
        wrapped = [
            textwrap.wrap(c, width, break_on_hyphens=False)
            for c, width in zip(cells, widths, strict=True)
        ]
        alignments = [alignment for _, alignment in self._columns]
        return [
            "  ".join(
                f"{cell:{alignment}{width}}"
                for cell, alignment, width in zip(line, alignments, widths, strict=True)
            ).rstrip()
            for line in zip_longest(*wrapped, fillvalue="")
        ]
