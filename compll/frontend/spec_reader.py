"""Stage 1b: the sections of a spec file become a Spec, checked for form, not yet for meaning."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from compll.errors import Problems, Span, closest
from compll.frontend import syntax
from compll.frontend.sections import (
    EXAMPLES,
    FEEDBACK_KEYS,
    MEANT,
    REQUIRED,
    SECTIONS,
    check_name,
    check_usable,
    mended,
)
from compll.frontend.source import Entry, Section, Text
from compll.frontend.spec import ANY, Binding, Chosen, Declared, Spec
from compll.frontend.spec_params import ParamReader
from compll.frontend.spec_types import declared
from compll.frontend.syntax import Syntax

#: `A if CONDITION else B`
CONDITIONAL = re.compile(r"(\w+)\s+if\b(.+)\belse\s+(\w+)", re.DOTALL)
NULLS = ("", "~", "null")


def read(root: Section, problems: Problems) -> Spec:
    """The Spec in `root`, as far as it can be read; mistakes are added to `problems`."""
    return _Reader(root, problems).spec()


def _empty(entry: Entry) -> bool:
    return isinstance(entry.value, Text) and entry.value.value in NULLS


class _Reader:
    def __init__(self, root: Section, problems: Problems) -> None:
        self.root, self.problems = root, problems
        self.broken: set[str] = set()

    def spec(self) -> Spec:
        self.root = mended(self.indented(), SECTIONS, "section {!r}", self.problems)
        for name in REQUIRED:
            if self.root.get(name) is None:
                self.problems.add(self.root.span, f"section {name!r} is missing")
        self.require_field(self.root.get("payload"))
        return self.build()

    def indented(self) -> Section:
        """The root, with unindented entries below an empty section moved into that section."""
        entries, empty = list[Entry](), False
        for entry in self.root.entries:
            if entry.key.value in SECTIONS:
                empty = _empty(entry) and entry.key.value in EXAMPLES
            elif empty and isinstance(entry.value, Text):
                above = entries.pop()
                hint = f"indent it, as an entry of `{above.key.value}:`"
                self.problems.add(entry.key.span, f"unknown section {entry.key.value!r}", hint)
                before = above.value.entries if isinstance(above.value, Section) else ()
                entry = Entry(above.key, Section((*before, entry), above.key.span))
            entries.append(entry)
        return Section(tuple(entries), self.root.span)

    def require_field(self, payload: Entry | None) -> None:
        if payload is None:
            return
        none = isinstance(payload.value, Section) and not payload.value.entries
        if none or _empty(payload):
            hint = "like `payload: {q: uint8[n]}`"
            self.problems.add(payload.key.span, "a payload has at least one field", hint)
            self.broken.add(ANY)

    def build(self) -> Spec:
        return Spec(
            path=self.problems.path,
            name=self.identifier("name"),
            about=self.text("about"),
            source=self.text("source"),
            params=self.each("params", ParamReader(self.problems).read),
            group=self.expression(self.root.get("group")),
            state=self.each("state", self.declaration),
            encode=self.each("encode", self.binding),
            payload=self.each("payload", self.declaration),
            decode=self.decode(),
            update=self.each("update", self.binding),
            owed=self.each("owed", self.binding),
            feedback=self.feedback(),
            merge=self.choice("merge"),
            unbiased=self.chosen("unbiased"),
            rounds=self.each("rounds", self.binding),
            when=self.expression(self.root.get("when")),
            spans={e.key.value: e.key.span for e in self.root.entries},
            broken=self.broken,
        )

    def text(self, name: str) -> str:
        entry = self.root.get(name)
        if entry is None:
            return ""
        if not isinstance(entry.value, Text):
            self.problems.add(entry.value.span, f"{name!r} is a text")
            return ""
        return entry.value.value.strip()

    def identifier(self, name: str) -> str:
        value, entry = self.text(name), self.root.get(name)
        if entry is not None and isinstance(entry.value, Text):
            check_name(Text(value, entry.value.span), self.problems)
        return value

    def choice(self, name: str) -> str:
        entry = self.root.get(name)
        value = self.text(name)
        if entry is None or not isinstance(entry.value, Text):
            return SECTIONS[name].choices[0]
        return self.one_of(name, value)

    def one_of(self, name: str, value: str) -> str:
        """`value`; reports an error if it is no choice of the section."""
        known, entry = SECTIONS[name].choices, self.root.get(name)
        if value not in known and entry is not None:
            close = MEANT.get(name, {}).get(value.lower()) or closest(value, known)
            self.problems.add(
                entry.value.span,
                f"{name!r} is one of {', '.join(known)}, not {value!r}",
                f"did you mean {close!r}?" if close else "",
            )
        return value

    def chosen(self, name: str) -> Chosen:
        """A choice, or two of them with a condition."""
        entry = self.root.get(name)
        if entry is None or not isinstance(entry.value, Text):
            return Chosen(self.choice(name), entry.key.span if entry else Span())
        return self.either(name, entry.value, entry.key.span)

    def either(self, name: str, text: Text, span: Span) -> Chosen:
        """A section's choice, read from a text."""
        parts = CONDITIONAL.fullmatch(text.value.strip())
        if parts is None:
            return Chosen(self.one_of(name, text.value.strip()), span)
        start = parts.start(2) + len(text.value) - len(text.value.lstrip())
        condition = syntax.parse_part(text, parts[2], start, self.problems)
        return Chosen(self.one_of(name, parts[1]), span, condition, self.one_of(name, parts[3]))

    def feedback(self) -> Chosen:
        """A choice, or a mapping with a factor."""
        entry = self.root.get("feedback")
        if entry is None or not isinstance(entry.value, Section):
            return self.chosen("feedback")
        section = mended(entry.value, FEEDBACK_KEYS, "{!r} in `feedback`", self.problems)
        decay, of, share = (section.get(key) for key in ("decay", "of", "difference"))
        if decay is None and share is None:
            hint = "like `feedback: {decay: 0.95}` or `feedback: {difference: 0.5}`"
            self.problems.add(entry.value.span, "this feedback has no 'decay'", hint)
        if share is not None:
            for other in (each for each in (decay, of) if each is not None):
                message = f"{other.key.value!r} does not go with 'difference'"
                self.problems.add(other.key.span, message, "leave one of them out")
            kind = Chosen("difference", entry.key.span)
            return replace(kind, factor=self.expression(share))
        kind = Chosen("error", entry.key.span)
        if of is not None and isinstance(of.value, Text):
            kind = self.either("feedback", of.value, entry.key.span)
        return replace(kind, factor=self.expression(decay))

    def each(self, name: str, make: Callable[[Entry], Any]) -> tuple[Any, ...]:
        entry = self.root.get(name)
        if entry is None or _empty(entry):
            return ()
        if not isinstance(entry.value, Section):
            self.problems.add(
                entry.value.span,
                f"section {name!r} is a mapping of names",
                f"like `{EXAMPLES.get(name, 'name: ...')}`",
            )
            self.broken.add(ANY)
            return ()
        for item in entry.value.entries:
            check_usable(item.key, self.problems)
        made = [(item.key.value, make(item)) for item in entry.value.entries]
        self.broken |= {name for name, value in made if value is None}
        return tuple(value for _, value in made if value is not None)

    def expression(self, entry: Entry | None) -> Syntax | None:
        if entry is None:
            return None
        if not isinstance(entry.value, Text):
            self.problems.add(
                entry.value.span,
                f"{entry.key.value!r} is an expression, not a list or mapping",
                "quote it when it begins with a bracket or holds a colon",
            )
            return None
        return syntax.parse(entry.value, self.problems)

    def declaration(self, entry: Entry) -> Declared | None:
        return declared(entry.key.value, entry.value, self.problems)

    def binding(self, entry: Entry) -> Binding | None:
        value = self.expression(entry)
        return None if value is None else Binding(entry.key.value, value, entry.key.span)

    def decode(self) -> tuple[Binding, ...]:
        entry = self.root.get("decode")
        if entry is not None and isinstance(entry.value, Section):
            if not entry.value.entries:
                self.problems.add(entry.value.span, "an expression is missing here")
            return self.results(entry.value, self.each("decode", self.binding))
        value = self.expression(entry)
        return () if value is None or entry is None else (Binding("out", value, entry.key.span),)

    def results(self, section: Section, read: tuple[Binding, ...]) -> tuple[Binding, ...]:
        """The bindings of decode. If the last could not be read, a binding to its name replaces it,
        so that the one before is not taken for the result."""
        last = section.entries[-1].key if section.entries else None
        if last is None or last.value not in self.broken:
            return read
        return (*read, Binding(last.value, syntax.Name(last.value, last.span), last.span))
