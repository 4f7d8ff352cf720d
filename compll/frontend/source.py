"""Stage 1: a YAML text becomes a tree in which every value knows its line and column.

Length, depth and number of values are limited before anything recurses.

PyYAML's constructor is not used: it reads `1e-3` as text, `off` as False and `012` as 10, and
forgets positions. Only its composer is used; scalars are read here by Python's rules.
"""

from __future__ import annotations

import errno
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from pathlib import Path
from typing import Any

import yaml

from compll.errors import Problems, Span, closest, nearest

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LIMIT_BYTES = 1 << 20
QUOTE = (
    "entries of a section are indented alike; "
    "quote a text that holds any of : # [ ] { } , & * ! | > ' \" % @ `"
)
LINE_BREAK = re.compile("\r\n?|[\x85\u2028\u2029]")
LIMIT_DEPTH = 16
#: characters that change how other text is shown, or that cannot be written as UTF-8
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Text:
    """A scalar, and the place of its first character. One of several lines is as it is written,
    with their indentation."""

    value: str
    span: Span
    quoted: bool = False

    def at(self, index: int) -> Span:
        """The place in the file of the character `index` of this text."""
        before = self.value[:index]
        breaks, column = before.count("\n"), index - (before.rfind("\n") + 1)
        return Span(self.span.line + breaks, column + (1 if breaks else self.span.col))


@dataclass(frozen=True)
class Entry:
    """A `key: value` pair of a mapping."""

    key: Text
    value: Value


@dataclass(frozen=True)
class Section:
    """A mapping, in file order, keys unique."""

    entries: tuple[Entry, ...]
    span: Span

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {e.key.value: e for e in self.entries}

    def get(self, name: str) -> Entry | None:
        """The entry of that name, or None."""
        return self._by_name.get(name)


@dataclass(frozen=True)
class Items:
    """A sequence."""

    values: tuple[Value, ...]
    span: Span


Value = Text | Section | Items


@dataclass(frozen=True)
class Kind:
    """The kind of a file: its name and usual beginning for messages, and its limits. The file is
    YAML, or JSON, which is a part of it."""

    name: str = "a spec"
    hint: str = "begin with `name:`, `encode:`, `payload:`, `decode:`"
    most_bytes: int = LIMIT_BYTES
    most_values: int = 4000


SPEC = Kind()


def load(path: Path, problems: Problems, kind: Kind = SPEC) -> Section | None:
    """Read a file. None (with the reason in `problems`) if it is not a YAML mapping."""
    text = read(path, problems, kind)
    return None if text is None else parse(text, problems, kind)


def read(path: Path, problems: Problems, kind: Kind = SPEC) -> str | None:
    """The text of a file; None with the reason in `problems`.

    Reads regular files only: a pipe may have no writer, and a device no end.
    """
    try:
        if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with path.open("rb") as file:
            data = file.read(kind.most_bytes + 1)
        if len(data) <= kind.most_bytes:
            return data.decode("utf-8")
        message = f"the file is too long: {kind.name} has at most {kind.most_bytes} bytes"
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text: {error.reason} at byte {error.start}"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        message = f"cannot read the file: {getattr(error, 'strerror', None) or error}"
    problems.add(Span(), message)
    return None


def parse(text: str, problems: Problems, kind: Kind = SPEC) -> Section | None:
    """Parse a file's text; positions are those of `text`. None, with the reason in `problems`, if
    it is not a YAML mapping."""
    text = LINE_BREAK.sub("\n", text)
    try:
        node = yaml.compose(text, Loader) if _composable(text, problems, kind) else None
        value = _Reader(text, problems, kind).value(node, 0) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        span = Span(mark.line + 1, mark.column + 1) if mark else Span()
        message = f"malformed YAML: {error.problem or error.context}"
        problems.add(span, message, error.note or _hint(text, error))
        return None
    except (yaml.YAMLError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else repr(error)
        problems.add(Span(), f"malformed YAML: {first}")
        return None
    if not isinstance(value, Section):
        span = value.span if value is not None else Span()
        if value is not None or not problems.diagnostics:
            problems.add(span, f"{kind.name} is a mapping of sections", kind.hint)
        return None
    return value


def _composable(text: str, problems: Problems, kind: Kind) -> bool:
    """True if a text may be composed, which recurses in C: reports one that nests too deep, has
    too many values, or has a tag, which the composer would drop."""
    depth = values = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.NodeEvent):
            values += 1
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            message = f"{event.tag} is a tag of YAML, which has no meaning here"
            problems.add(_span(event), message, "the opposite of a condition is `not condition`")
            return False
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > LIMIT_DEPTH or values > 2 * kind.most_values:  # a value may have a key
            many = f"more than {kind.most_values} values"
            deep = f"nested more than {LIMIT_DEPTH} deep"
            problems.add(_span(event), deep if depth > LIMIT_DEPTH else many)
            return False
    return True


def _hint(text: str, error: yaml.MarkedYAMLError) -> str:
    """A hint for a text that is not YAML."""
    index = error.problem_mark.index if error.problem_mark else len(text)
    begun = text[text.rfind("\n", 0, index) + 1 : index + 1]
    if re.search(r":\s+\|\S", begun):
        return "the magnitude of x is abs(x)"
    if "tab" in str(error.problem) or text[index : index + 1] == "\t":
        return "indent with spaces"
    if "',' or" in str(error.problem) and text[index : index + 1] == "[":  # of `{q: uint8[n]}`
        before = re.split(r"[{,\n]|:\s", text[:index])[-1]
        after = re.split(r"[},\n]", text[index:], maxsplit=1)[0]
        return f'in braces, a text that holds a [ is quoted: "{(before + after).strip()}"'
    return QUOTE


def _span(node: Any) -> Span:
    return Span(node.start_mark.line + 1, node.start_mark.column + 1)


class _Reader:
    """Turns composed nodes into values. Counts them, since aliases can multiply a short text."""

    def __init__(self, text: str, problems: Problems, kind: Kind) -> None:
        self.text, self.problems = text, problems
        self.most = self.left = kind.most_values

    def value(self, node: yaml.Node, depth: int) -> Value | None:
        self.left -= 1
        if self.left == 0:
            self.problems.add(_span(node), f"more than {self.most} values, aliases counted")
        if self.left <= 0:
            return None
        if depth > LIMIT_DEPTH:
            self.problems.add(_span(node), f"nested more than {LIMIT_DEPTH} deep")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if isinstance(node, yaml.SequenceNode):
            values = [self.value(item, depth + 1) for item in self.within(node)]
            return Items(tuple(v for v in values if v is not None), _span(node))
        assert isinstance(node, yaml.MappingNode)
        return self.section(node, depth)

    def within(self, node: yaml.Node) -> Iterator[Any]:
        """The node's parts, up to the limit of values."""
        for part in node.value:
            if self.left <= 0:
                return
            yield part

    def scalar(self, node: yaml.ScalarNode) -> Text:
        value, span, quoted = str(node.value), _span(node), node.style in ("'", '"')
        start, end = node.start_mark.index, node.end_mark.index
        if quoted:
            span, start, end = Span(span.line, span.col + 1), start + 1, end - 1
        elif node.style in ("|", ">"):
            start = self.text.find("\n", start, end) + 1 or end
            span = Span(span.line + 1)
        written = self.text[start:end]  # YAML folds lines, which only changes white space
        if "\n" in written and written.split() == value.split():
            value = written
        return Text(visible(value), span, quoted)

    def section(self, node: yaml.MappingNode, depth: int) -> Section:
        entries: dict[str, Entry] = {}
        for key_node, value_node in self.within(node):
            if node.flow_style and _open(value_node):
                hint = "quote the expression, or write it on its own line"
                message = "in braces a comma ends an entry"
                raise yaml.MarkedYAMLError(None, None, message, value_node.start_mark, hint)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.add(_span(key_node), "a key is a plain name")
                continue
            key, value = self.scalar(key_node), self.value(value_node, depth + 1)
            if key.value in entries:
                first = entries[key.value].key.span.line
                self.problems.add(
                    key.span, f"{key.value!r} appears twice", f"first at line {first}"
                )
            elif value is not None:
                entries[key.value] = Entry(key, value)
        return Section(tuple(entries.values()), _span(node))


def _open(node: yaml.Node) -> bool:
    """True for an unquoted text that ends within parentheses."""
    plain = isinstance(node, yaml.ScalarNode) and not node.style
    return plain and node.value.count("(") > node.value.count(")")


def visible(text: str) -> str:
    """The text with its control characters as Python's escapes, so that it can be shown."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def number(text: str) -> int | float | None:
    """The number that `text` spells by Python's rules (`1e-3` too), or None."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def scalar(text: Text) -> int | float | bool | str:
    """A parameter value: a number, true or false; else the text itself."""
    if not text.quoted and text.value.lower() in ("true", "false"):
        return text.value.lower() == "true"
    parsed = None if text.quoted else number(text.value)
    return text.value if parsed is None else parsed


# ---- sections -----------------------------------------------------------------------------------
# The table of a spec's sections, for the reader, the JSON Schema and the docs; the form of
# names, and corrections of misspelled keys.


@dataclass(frozen=True)
class SectionRow:
    """A section. form: text, name, expression, choice, chosen (a choice, or one of two by a
    condition of parameters), or the values of a mapping: params, declarations (types) or bindings
    (expressions); feedback: chosen, or FEEDBACK_KEYS; `decode` is an expression or bindings."""

    name: str
    form: str
    about: str
    required: bool = False
    choices: tuple[str, ...] = ()


_ROWS = (
    SectionRow("name", "name", "the compressor's name; required", required=True),
    SectionRow("about", "text", "its purpose in one line, for people"),
    SectionRow("source", "text", "its origin (paper, code), for people"),
    SectionRow("params", "params", "`name: default`, or `name: {type, default, min, max, choices, from, about}`; types int, float, bool, str"),
    SectionRow("group", "expression", "a power of two from 8 to 16384, or 0 (the whole tensor): reductions run over that many neighbouring elements"),
    SectionRow("state", "declarations", "`name: float32[n]`, `bfloat16[n]` or `float16[n]` (per element), `float32` (per tensor) or `float32[rows, columns]`, kept between calls, zero at first"),
    SectionRow("encode", "bindings", "`name: expression`, in order; later ones may use earlier ones"),
    SectionRow("payload", "declarations", "`name: type`: the names that travel, and their types; required", required=True),
    SectionRow("decode", "expression or bindings", "an expression, or `name: expression` with the result last; sees payload fields, parameters, and what encode computes from parameters and `n` alone; required", required=True),
    SectionRow("update", "bindings", "`state: expression`: the states' new values"),
    SectionRow("owed", "bindings", "`state: factor`, which may follow from parameters: a unit of the state is so much gradient that was not sent yet, to be delivered if another compressor takes over"),
    SectionRow("feedback", "feedback", "`error`: the compiler derives and fuses `residual = g - decode(encode(g))`, and adds the residual to the next `g`; `own`: the same in a spec with rounds, where `error` means what all ranks' payloads decode to; `own if residual else none`: parameters choose; `{decay: 0.95}`, `{decay: 0.95, of: own}`: the residual is multiplied by that before it is added; `difference`: encode sees the gradient's difference from a reference that takes up what it decodes to, and receivers add the mean of all references (EF21); `{difference: 0.5}`: the reference takes up that share (DIANA)", choices=("none", "error", "own", "difference")),
    SectionRow("merge", "choice", "`sum`: payloads of one float field add without decoding, so that a native all-reduce sums them; `vote`: an aggregator adds up decoded values and encodes the sum again, without states or averaging", choices=("decode", "sum", "vote")),
    SectionRow("rounds", "bindings", "`field: mean` (or `max`), for every payload field: the ranks combine the fields in this order, one after the other; see Aggregating in rounds"),
    SectionRow("when", "expression", "a condition of `n` and parameters: a tensor for which it does not hold is not worth compressing"),
    SectionRow("unbiased", "chosen", "`true`: over seeds and steps, the mean of the decoded values is `g`; tested for every spec that claims it; `false if residual else true`: parameters choose", choices=("false", "true")),
)  # fmt: skip

#: words that people write in place of a choice
MEANT = {
    "feedback": {"true": "error", "yes": "error", "residual": "error", "false": "none"},
    "merge": {"majority": "vote", "add": "sum", "mean": "decode", "average": "decode"},
    "unbiased": {"yes": "true", "no": "false"},
    "optimizers": {"adam": "any", "adamw": "any", "all": "any"},
}
#: an example entry of each section that is a mapping
EXAMPLES = {
    "params": "ratio: 0.01", "state": "m: float32[n]", "encode": "q: abs(g)", "payload": "q: uint8[n]",
    "rounds": "p: mean", "update": "m: 0.9 * m + g", "owed": "sum: 1",
}  # fmt: skip

FEEDBACK_KEYS = {
    "decay": "a number from 0 to 1, which may follow from parameters: what the residual is multiplied by before it is added",
    "of": "`error` (the default) or `own`, as in `feedback: own`",
    "difference": "a number from 0 to 1, which may follow from parameters: the share of the decoded difference that the reference takes up",
}
SECTIONS: dict[str, SectionRow] = {row.name: row for row in _ROWS}
REQUIRED = tuple(row.name for row in _ROWS if row.required)
PARAM_KEYS = {
    "type": "int, float, bool or str; that of the default where it is not given",
    "default": "the value when none is given; required",
    "min": "the smallest value allowed",
    "max": "the largest value allowed",
    "choices": "a list of the values allowed",
    "from": "`rows` or `columns`: what is not given follows from the tensor's shape, where the shape is known and within the limits; the first axis is the rows, the others together are the columns",
    "about": "what the parameter means, for people",
}
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


def mended(section: Section, names: Collection[str], what: str, problems: Problems) -> Section:
    """The section with misspelled keys reported and corrected."""
    entries = list[Entry]()
    for entry in section.entries:
        name = entry.key.value
        if name not in names:
            problems.add(entry.key.span, f"unknown {what.format(name)}", nearest(name, names))
            meant = closest(name, names)
            if meant is None or section.get(meant) is not None:
                continue
            entry = Entry(Text(meant, entry.key.span), entry.value)
        entries.append(entry)
    return Section(tuple(entries), section.span)
