"""Stage 1: a YAML text becomes a tree in which every value knows its line and column.

PyYAML's constructor is not used: it reads `1e-3` as text, `off` as False and `012` as 10, and
forgets positions. Only its composer is, and scalars are read here by Python's rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compll.errors import Problems, Span

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LIMIT_BYTES = 1 << 20
LIMIT_DEPTH = 16


@dataclass(frozen=True)
class Text:
    """A scalar as it is written, and the place of its first character."""

    value: str
    span: Span
    quoted: bool = False

    def at(self, line: int, col: int) -> Span:
        """The place in the file of a place (line from 1, col from 0) inside this text."""
        if line == 1:
            return Span(self.span.line, self.span.col + col)
        return Span(self.span.line + line - 1, col + 1)


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a mapping."""

    key: Text
    value: Value


@dataclass(frozen=True)
class Section:
    """A mapping, in file order, keys unique."""

    entries: tuple[Entry, ...]
    span: Span

    def get(self, name: str) -> Entry | None:
        """The entry of that name, or None."""
        return next((e for e in self.entries if e.key.value == name), None)


@dataclass(frozen=True)
class Items:
    """A sequence."""

    values: tuple[Value, ...]
    span: Span


Value = Text | Section | Items


def load(path: Path, problems: Problems) -> Section | None:
    """Read a spec file. None (with the reason in `problems`) when it is no YAML mapping."""
    try:
        data = path.read_bytes()
    except OSError as error:
        problems.add(Span(), f"cannot read the file: {error.strerror or error}")
        return None
    if len(data) > LIMIT_BYTES:
        problems.add(Span(), f"the file has {len(data)} bytes; a spec has at most {LIMIT_BYTES}")
        return None
    try:
        return parse(data.decode("utf-8"), problems)
    except UnicodeDecodeError as error:
        problems.add(Span(), f"not UTF-8 text: {error.reason} at byte {error.start}")
        return None


def parse(text: str, problems: Problems) -> Section | None:
    """Parse a spec's text; positions are those of `text`."""
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        span = Span(mark.line + 1, mark.column + 1) if mark else Span()
        problems.add(
            span,
            f"malformed YAML: {error.problem or error.context}",
            "quote a text that holds any of : # [ ] { } , & * ! | > ' \" % @ `",
        )
        return None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problems.add(
            Span(), f"malformed YAML: {str(error).splitlines()[0] if str(error) else error!r}"
        )
        return None
    value = _value(node, problems, 0) if node is not None else None
    if not isinstance(value, Section):
        span = value.span if value is not None else Span()
        if value is not None or not problems.found:
            problems.add(
                span,
                "a spec is a mapping of sections",
                "begin with `name:`, `encode:`, `payload:`, `decode:`",
            )
        return None
    return value


def _span(node: yaml.Node) -> Span:
    return Span(node.start_mark.line + 1, node.start_mark.column + 1)


def _value(node: yaml.Node, problems: Problems, depth: int) -> Value | None:
    if depth > LIMIT_DEPTH:
        problems.add(_span(node), f"nested more than {LIMIT_DEPTH} deep")
        return None
    if isinstance(node, yaml.ScalarNode):
        return _text(node)
    if isinstance(node, yaml.SequenceNode):
        values = [_value(item, problems, depth + 1) for item in node.value]
        return Items(tuple(v for v in values if v is not None), _span(node))
    return _section(node, problems, depth)


def _text(node: yaml.ScalarNode) -> Text:
    span, quoted = _span(node), node.style in ("'", '"')
    if quoted:
        span = Span(span.line, span.col + 1)
    elif node.style in ("|", ">"):
        span = Span(span.line + 1, span.col)
    return Text(str(node.value), span, quoted)


def _section(node: yaml.Node, problems: Problems, depth: int) -> Section:
    entries: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            problems.add(_span(key_node), "a key is a plain name")
            continue
        key = _text(key_node)
        value = _value(value_node, problems, depth + 1)
        if key.value in entries:
            problems.add(
                key.span,
                f"{key.value!r} appears twice",
                f"first at line {entries[key.value].key.span.line}",
            )
        elif value is not None:
            entries[key.value] = Entry(key, value)
    return Section(tuple(entries.values()), _span(node))


def number(text: str) -> int | float | None:
    """The number that `text` spells by Python's rules (`1e-3` too), or None."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def scalar(text: Text) -> int | float | bool | str:
    """A parameter value: a number, true or false, else the text itself."""
    if not text.quoted and text.value.lower() in ("true", "false"):
        return text.value.lower() == "true"
    parsed = None if text.quoted else number(text.value)
    return text.value if parsed is None else parsed
