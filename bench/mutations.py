"""Damaged bytes, texts and values, by a random number generator, for bench.fuzz and tests."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\*\*|//|<=|>=|==|\s+|.", re.DOTALL)
ODD_TOKENS = ("?", "\0", "é", "&a", "*a", "@", "|")
#: replacements for a value of a text
ODD_TEXTS = (
    "", "~", "[]", "{}", "[1, 2]", "{a: b}", "!!python/name:os.system", "*a", "1e999", "-1", "0",
    "9" * 300, "nan", ".inf", "0x10", "n", "g", "step", "__import__('os').system('touch pwned')",
    "open('pwned', 'w')",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e300, float("inf"), float("nan"), "",
    "x", "é" * 40, [], {}, [[]], [1], {"a": 1}, {1: 2}, ["a", "b", 1, 1], b"",
    torch.zeros(0), torch.zeros(3), torch.full((2, 2), float("nan")),
    torch.ones(3, dtype=torch.int64),
)  # fmt: skip


def of_bytes(data: NDArray[np.uint8], random: Random) -> NDArray[np.uint8]:
    """Bytes with one to four faults: other values, words repeated, moved, cut off or added."""
    mutated = bytearray(data.tobytes())
    for _ in range(random.choice((1, 1, 2, 4))):
        random.choice(_FAULTS)(mutated, random)
    return np.frombuffer(bytes(mutated), np.uint8).copy()


def _other_byte(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice(
            (0, 1, 127, 128, 255, random.randrange(256))
        )


def _head_byte(data: bytearray, random: Random) -> None:
    """Index of a byte, more often one of the head, with its counts and lengths."""
    if data:
        data[random.randrange(min(12, len(data)))] = random.randrange(256)


def _flip_bit(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _copy_word(data: bytearray, random: Random) -> None:
    """Copy a word to another place, which may repeat positions, or make them descend."""
    if len(data) >= 8:
        here, there = (4 * random.randrange(len(data) // 4) for _ in range(2))
        data[there : there + 4] = data[here : here + 4]


def _cut(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data) + 1) :]


def _longer(data: bytearray, random: Random) -> None:
    data += random.randbytes(random.choice((1, 4, 9)))


def _noise(data: bytearray, random: Random) -> None:
    data[:] = random.randbytes(len(data))


_FAULTS: Sequence[Callable[[bytearray, Random], None]] = (
    _other_byte, _other_byte, _head_byte, _flip_bit, _copy_word, _cut, _longer, _noise,
)  # fmt: skip


def tokens(texts: Sequence[str]) -> list[str]:
    """All tokens of some texts, and odd ones."""
    return sorted({token for text in texts for token in TOKEN.findall(text)} | {*ODD_TOKENS})


def by_tokens(text: str, known: Sequence[str], random: Random) -> str:
    """The text with one to four tokens dropped, repeated or replaced."""
    parts = TOKEN.findall(text)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(parts))
        kinds: tuple[list[str], ...] = ([], [parts[at]] * 2, [random.choice(known)])
        parts[at : at + 1] = random.choice(kinds)
        parts = parts or [" "]
    return "".join(parts)


def by_sections(text: str, others: Sequence[str], random: Random) -> str:
    """The text with one to three sections dropped, exchanged for others, or added."""
    parts = sections(text)
    for _ in range(random.randint(1, 3)):
        at, kind = random.randrange(len(parts)), random.choice(("drop", "swap", "add"))
        parts[at : at + (kind != "add")] = [] if kind == "drop" else [random.choice(others)]
        parts = parts or ["name: x"]
    return "\n".join(parts) + "\n"


def sections(text: str) -> list[str]:
    """A YAML mapping's entries, as they are written."""
    return re.split(r"\n(?=\w)", text.rstrip("\n"))


def by_values(text: str, random: Random) -> str:
    """A text with one scalar exchanged for another value, of any kind."""
    spots = [match.span(1) for match in re.finditer(r": ([^\n{}]+)", text)]
    if not spots:
        return text
    start, end = random.choice(spots)
    return text[:start] + random.choice(ODD_TEXTS) + text[end:]


def by_bulk(text: str, random: Random) -> str:
    """A YAML text with a value that nests deep, that means billions of others by aliases, or that
    is huge; or with one of its lines many times, as it is or with other names."""
    size = random.choice((20, 300, 5_000, 100_000))
    lines = text.splitlines() or [""]
    at, kind = random.randrange(len(lines)), random.randrange(8)
    if kind >= 6:
        before, name, after = re.split(r"(\w+|$)", lines[at], maxsplit=1)
        many = range(min(size, 20_000))
        new = [f"{before}{name}{i if kind == 6 else ''}{after}" for i in many]
        return "\n".join(lines[:at] + new + lines[at:])
    laughs = [f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    values = (
        "[" * size + "]" * random.choice((0, size)),
        '{"a": ' * size,
        f"[&a0 [x], {', '.join(laughs)}]",
        "&a [*a]",
        random.choice("a9.(+-[,") * size,
        f"\n{' ' * 8}".join(("", *("- " * min(size, 9_000),))),
    )
    key, colon, _ = lines[at].partition(":")
    return "\n".join([*lines[:at], f"{key}{colon or ':'} {values[kind]}", *lines[at + 1 :]])


def of_value(value: Any, random: Random) -> Any:
    """A copy of nested mappings and lists with one to three other values or keys."""
    mutated = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        mutated = _change(mutated, random)
    return mutated


def _change(value: Any, random: Random) -> Any:
    """The value, changed in one place."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.15:
        return copy.deepcopy(random.choice(ODD_VALUES))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, kind = random.choice(keys), random.random()
    if kind < 0.1:
        del value[key]
    elif kind < 0.2 and isinstance(value, dict):
        value[random.choice(("", "x", 7, *keys))] = value.pop(key)
    elif kind < 0.3:
        value[key] = copy.deepcopy(value[random.choice(keys)])
    else:
        value[key] = _change(value[key], random)
    return value
