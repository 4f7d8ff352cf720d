"""The table of a spec's sections, for the reader, the JSON Schema and the docs; the form of names,
and corrections of misspelled keys."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from keyword import iskeyword

from compll.errors import Problems, closest, nearest
from compll.frontend.source import Entry, Section, Text


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
