"""Names and keys in a spec file: checks of their form, and corrections of misspelled ones."""

from __future__ import annotations

import re
from collections.abc import Collection
from keyword import iskeyword

from compll.errors import Problems, closest, nearest
from compll.frontend.source import Entry, Section, Text

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
NAME_HINT = "letters, digits and underscores, not a digit first"


def check_name(text: Text, problems: Problems) -> None:
    """Report a text that is not a name."""
    if not NAME.match(text.value):
        problems.add(text.span, f"{text.value!r} is not a name", NAME_HINT)


def check_usable(text: Text, problems: Problems) -> None:
    """Report a text that is not a name, or that expressions cannot use as one."""
    check_name(text, problems)
    if iskeyword(text.value):
        problems.add(text.span, f"{text.value!r} is a word of the language", "choose another name")


def mended(section: Section, known: Collection[str], what: str, problems: Problems) -> Section:
    """The section with misspelled keys reported and corrected."""
    entries = list[Entry]()
    for entry in section.entries:
        name = entry.key.value
        if name not in known:
            problems.add(entry.key.span, f"unknown {what.format(name)}", nearest(name, known))
            meant = closest(name, known)
            if meant is None or section.get(meant) is not None:
                continue
            entry = Entry(Text(meant, entry.key.span), entry.value)
        entries.append(entry)
    return Section(tuple(entries), section.span)
