"""Exceptions that compll raises on purpose.

CompllError
├── SpecError        a spec (or its parameters) is wrong; carries all diagnostics at once
├── PayloadError     bytes that are not a payload of this codec
└── UsageError       a call with the wrong array, length or state
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

#: names that a hint lists
LISTED = 12
#: characters of a message
LONGEST = 1000
#: mistakes of a file that are listed: reading ends with the last of them
MOST = 100


class CompllError(Exception):
    """Base of compll's errors."""


class PayloadError(CompllError, ValueError):
    """Bytes that are not a payload of this codec: a wrong length, or an index out of range."""


class UsageError(CompllError, ValueError):
    """A call with an array, length or state that the codec cannot take."""


@dataclass(frozen=True, order=True)
class Span:
    """A place in a spec file: line and column, both from 1."""

    line: int = 1
    col: int = 1


class RuleError(Exception):
    """The arguments of an operator, or a declaration's parts, do not fit; caught by the checker,
    which knows the place unless `span` names another."""

    def __init__(self, message: str, hint: str = "", span: Span | None = None) -> None:
        super().__init__(message)
        self.hint, self.span = hint, span


@dataclass(frozen=True, order=True)
class Diagnostic:
    """A mistake in a spec, and a hint for mending it."""

    path: str  # "" for a mistake in a call
    span: Span
    message: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"\n    hint: {self.hint}" if self.hint else ""
        place = f"{self.path}:{self.span.line}:{self.span.col}: " if self.path else ""
        return f"{place}{self.message}{hint}"


class SpecError(CompllError):
    """A spec that cannot be compiled; `diagnostics` lists everything found, in file order."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(set(diagnostics)))
        super().__init__("\n".join(str(d) for d in self.diagnostics))

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[Diagnostic, ...]]]:
        return SpecError, (self.diagnostics,)


@dataclass
class Problems:
    """Collects diagnostics of one file, so that all are raised together."""

    path: str
    diagnostics: list[Diagnostic] = field(default_factory=list)
    #: the number of them that is raised without waiting for more
    most: float = MOST

    def add(self, span: Span, message: str, hint: str = "") -> None:
        """Record one problem at `span`. Raises all of them once they are too many."""
        self.diagnostics.append(Diagnostic(self.path, span, _short(message), _short(hint)))
        if len(self.diagnostics) >= self.most:
            end = max(each.span for each in self.diagnostics)
            message = f"{len(self.diagnostics)} mistakes: reading ends here"
            self.diagnostics.append(Diagnostic(self.path, Span(end.line, end.col + 1), message))
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise one SpecError with everything recorded so far."""
        if self.diagnostics:
            raise SpecError(self.diagnostics)


def _short(text: str) -> str:
    """A message, without the middle of a name of thousands of characters."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """The entry of `candidates` that `name` was probably meant to be, or None."""
    names = {n.lower(): n for n in sorted(candidates, reverse=True)}
    result = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return names[result[0]] if result else None


def nearest(name: str, candidates: Iterable[str]) -> str:
    """A hint with the closest entry of `candidates`; else all of few entries, or ""."""
    names = sorted(candidates)
    close = closest(name, names)
    if close:
        return f"did you mean {close!r}?"
    return f"known here: {', '.join(names)}" if 0 < len(names) <= LISTED else ""
