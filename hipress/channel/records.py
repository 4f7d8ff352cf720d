"""The record of a state: one format for every way in, of plain tensors, numbers and texts.

Ranks differ in what they have not delivered, so each saves a record of its own, and only as many
ranks can go on from these, bit for bit. A portable record is the same on all ranks, and fits any
number of them: see [Note: portable states] in engine/saving.py. `torch.load(weights_only=True)`
reads both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hipress.channel.states import AGGREGATOR, WORKER, States
from hipress.codecs import full_name
from hipress.errors import StateError, shown

__all__ = [
    "GRADIENTS",
    "GROUP",
    "OUTER",
    "SHARDS",
    "Entry",
    "check_record",
    "check_states",
    "make_record",
]

FORMAT = 8
GRADIENTS, SHARDS, OUTER, GROUP = "gradients", "shards", "outer", "group"
#: values of `of`, and where they come from
SOURCES = {
    GRADIENTS: "a model of hipress.wrap, attach, Synchronizer or Gossip",
    SHARDS: "a model of hipress.shard",
    OUTER: "a hipress.Outer",
    GROUP: "a process group hipress",
}
NAMED = 5  # most names in a shared error

Shape = tuple[int, ...]


def make_record(of: str, counter: int, **entries: Any) -> dict[str, Any]:
    """A record.

    Args:
        of: the kind of way in: GRADIENTS, SHARDS, OUTER, GROUP, or a text of its own.
        counter: steps, backward passes or rounds so far, the same on all ranks.
        entries: those that are not empty, of:
            place: this rank and the number of ranks, for each dimension in which it is one of
                several; empty in a portable record.
            portable: True if all ranks have the same record.
            plan: compressor and strategy by name, as of Plan.by_name.
            codecs: [digest, text, scheme] by name of a tensor with states: see Entry.
            states: tensors by name, side and name of a state.
            sums: gradient of which a unit of a state is, by name and state; in a portable record.
            undelivered: gradients by name, float32, in addition to those that states hold back.
            more: entries that only this way in has.
    """
    empty: dict[str, Any] = {key: {} for key in _MAPPINGS} | {"place": [], "portable": False}
    return {"format": FORMAT, "of": of, "counter": counter} | empty | entries


_MAPPINGS = ("plan", "codecs", "states", "sums", "undelivered", "more")
_KEYS = {"format", "of", "counter", "place", "portable", *_MAPPINGS}


def check_record(saved: object, *of: str) -> None:
    """Raise StateError for an object that `make_record` did not make, or not of one of these."""
    if not isinstance(saved, Mapping):
        raise StateError(f"not a state of hipress.state_dict but a {type(saved).__name__}")
    number = saved.get("format")
    if type(number) is int and number != FORMAT:
        other = "an earlier" if number < FORMAT else "a later"
        raise StateError(f"state format {number} of {other} version; this one reads {FORMAT}")
    if set(saved) != _KEYS:
        keys, names = sorted(_KEYS), sorted(map(str, saved))
        raise StateError(f"not a state of hipress.state_dict: expected {keys}, got {names}")
    for key, wanted, fits in _TYPES:
        if not fits(saved[key]):
            raise StateError(f"damaged state: {key} {shown(saved[key])}: expected {wanted}")
    if saved["of"] not in of:
        its, mine = (SOURCES.get(each, each) for each in (saved["of"], of[0]))
        raise StateError(f"the state is that of {its}, and this is {mine}")


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _by_text(values: object) -> bool:
    return isinstance(values, Mapping) and all(isinstance(name, str) for name in values)


def _are_ways(plan: Any) -> bool:
    return _by_text(plan) and all(map(_is_way, plan.values()))


def _is_way(way: object) -> bool:
    """True for an entry of Plan.by_name, whose last number need not be there."""
    kinds = [str, str, int, int]
    if not isinstance(way, list) or len(way) not in (3, 4):
        return False
    return [type(each) for each in way] == kinds[: len(way)] and way[2] > 0 and way[-1] >= 0


def _are_codecs(codecs: Any) -> bool:
    return _by_text(codecs) and all(_are_texts(each) and len(each) == 3 for each in codecs.values())


def _are_states(states: Any) -> bool:
    return _by_text(states) and all(
        isinstance(sides, Mapping)
        and set(sides) <= {WORKER, AGGREGATOR}
        and all(map(_are_tensors, sides.values()))
        for sides in states.values()
    )


def _are_tensors(values: Any) -> bool:
    return _by_text(values) and all(isinstance(each, torch.Tensor) for each in values.values())


def _are_sums(sums: Any) -> bool:
    return _by_text(sums) and all(
        _by_text(factors) and all(isinstance(each, float) for each in factors.values())
        for factors in sums.values()
    )


#: keys, words for their values, and checks; in the order of the checks
_TYPES: tuple[tuple[str, str, Any], ...] = (
    ("format", "a number", lambda each: type(each) is int),
    ("of", "a text", lambda each: isinstance(each, str)),
    ("counter", "a number of steps", lambda each: type(each) is int and 0 <= each < 2**63),
    (
        "place",
        "whole numbers",
        lambda each: isinstance(each, list) and all(type(one) is int for one in each),
    ),
    ("portable", "True or False", lambda each: type(each) is bool),
    ("plan", "a codec, a strategy and partitions by name", _are_ways),
    ("codecs", "three texts by name", _are_codecs),
    ("states", "tensors by name, side and name of a state", _are_states),
    ("sums", "factors by name of a state", _are_sums),
    ("undelivered", "tensors by name", _are_tensors),
    ("more", "entries by name", _by_text),
)


@dataclass(frozen=True)
class Entry:
    """A tensor with states, as records name it."""

    key: str  # of its codec, as plans have it
    digest: str  # of its codec, and of its owners'
    text: str  # for errors
    scheme: str  # its way, which decides the meaning and the place of its states
    shapes: Mapping[str, Mapping[str, Shape]] = field(default_factory=dict)  # by side and state
    needed: tuple[str, ...] = ()  # sides without which a record is damaged

    def told(self) -> list[str]:
        """The entry of a record's `codecs`."""
        return [self.digest, self.text, self.scheme]


def entries_of(states: States[str]) -> dict[str, Entry]:
    """The entries of all tensors that have states."""
    return {name: _entry(states, name) for name in states.places}


def _entry(states: States[str], name: str) -> Entry:
    place = states.places[name]
    codecs = list(place.arena.codecs.values())
    return Entry(
        key=place.arena.codec,
        digest="/".join(dict.fromkeys(codec.digest for codec in codecs)),
        text=" and down ".join(dict.fromkeys(map(full_name, codecs))),
        scheme=place.slice.strategy,
        shapes=states.shapes(name),
        needed=tuple(place.arena.codecs),
    )


def export_states(states: States[str]) -> dict[str, Any]:
    """The entries `codecs` and `states` of a record, for all of these."""
    entries = {name: entry.told() for name, entry in entries_of(states).items()}
    return {"codecs": entries, "states": states.export()}


def check_place(saved: Mapping[str, Any], place: Sequence[int]) -> list[str]:
    """Errors if states are another rank's, or of another number of ranks."""
    alike = saved["of"] != OUTER and not saved["codecs"]  # any rank's will do
    if alike or saved["place"] == [*place]:
        return []
    its, mine = map(_ranks, (saved["place"], place))
    return [
        f"saved by rank {its}, this is rank {mine}: every rank saves and loads its own, as many "
        "ranks as before do, or all save with portable=True"
    ]


def _ranks(place: Sequence[int]) -> str:
    """Text such as `0 of 4`; of several dimensions `0 of 4, 1 of 2`."""
    return ", ".join(f"{r} of {n}" for r, n in zip(place[::2], place[1::2], strict=False))


def check_states(
    saved: Mapping[str, Any],
    entries: Mapping[str, Entry],
    others: Mapping[str, str],
    *,
    moved: bool = False,
) -> tuple[list[str], list[str]]:
    """Names of `entries` whose states fit, and errors.

    others: texts of the codecs of tensors without states, by name. moved: True if the record is of
    another rank, which may lack what this rank aggregates.
    """
    good, wrong = [], dict[str, list[str]]()
    for name, entry in entries.items():
        problem, problems = _other(saved, name, entry), []
        if problem is not None:
            wrong.setdefault(problem, []).append(name)
            continue
        if name not in saved["states"]:
            problems.append("its values are missing from the saved state")
        else:
            values = saved["states"][name]
            needed = [side for side in entry.needed if side == WORKER or not moved]
            missing = [side for side in needed if side not in values]
            problems += [f"{side} values are missing from the saved state" for side in missing]
            problems += check_shapes(entry, values, whole=True)
        for each in problems:
            wrong.setdefault(each, []).append(name)
        if not problems:
            good.append(name)
    for name in {**saved["codecs"], **saved["states"]}:
        if name not in entries:
            wrong.setdefault(_unwanted(saved, name, others), []).append(name)
    return good, [f"{shorten(names)}: {problem}" for problem, names in wrong.items()]


def _other(saved: Mapping[str, Any], name: str, entry: Entry) -> str | None:
    """Text if a tensor has no values in the record, or those of another codec or strategy."""
    if name not in saved["codecs"]:
        codec, *_ = saved["plan"].get(name, [entry.key])
        if codec == entry.key:
            return "missing from the saved state"
        return f"saved with {codec or 'no compressor'}, which keeps no state, this is {entry.text}"
    digest, text, scheme = saved["codecs"][name]
    if digest != entry.digest:
        other = " of another spec" * (text == entry.text)
        return f"saved with {text}{other}, this is {entry.text}"
    if scheme != entry.scheme:
        return f"saved with strategy {scheme}, this is {entry.scheme}"
    return None


def _unwanted(saved: Mapping[str, Any], name: str, others: Mapping[str, str]) -> str:
    """Text for a tensor whose saved values have no use here."""
    before = saved["codecs"].get(name, ["", "another compressor"])[1]
    if name not in others:
        return f"saved with {before}, and there is no such parameter here"
    return f"saved with {before}, this is {others[name]}, which keeps no state"


def check_shapes(
    entry: Entry, saved: Mapping[str, Mapping[str, torch.Tensor]], *, whole: bool = False
) -> list[str]:
    """Errors in a tensor's values, by side and state. whole: no state of a side may lack."""
    wrong = []
    for side, values in saved.items():
        wanted = entry.shapes.get(side, {})
        names = dict.fromkeys(wanted) if whole else {}
        shapes = names | {name: tuple(value.shape) for name, value in values.items()}
        wrong += [
            f"{side} {name}: expected {wanted.get(name)}, got {shape}"
            for name, shape in shapes.items()
            if shape != wanted.get(name)
        ]
        wrong += [
            f"{side} {name}: {problem}"
            for name, value in values.items()
            if (problem := unusable(value))
        ]
    return wrong


def check_undelivered(
    saved: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> tuple[list[str], list[str]]:
    """Names whose undelivered gradients fit, and errors in the others. shapes: by name."""
    good, wrong = [], []
    for name, values in saved["undelivered"].items():
        if name not in shapes:
            wrong.append(f"{name}: undelivered, and is no parameter here")
        elif tuple(values.shape) != shapes[name]:
            wrong.append(f"{name}: undelivered: expected {shapes[name]}, got {tuple(values.shape)}")
        elif problem := unusable(values):
            wrong.append(f"{name}: undelivered: {problem}")
        else:
            good.append(name)
    return good, wrong


def unusable(values: torch.Tensor) -> str | None:
    """The reason why these cannot be values of a state, which are finite floats; or None."""
    plain = values.layout == torch.strided and values.device.type != "meta"
    if not (plain and values.is_floating_point()):
        kind = f"{values.dtype} {values.layout} on {values.device}".replace("torch.", "")
        return f"expected floats in memory, got {kind}"
    if not values.float().isfinite().all():  # they would reach every rank in the next step
        return "damaged: a value is NaN or infinite"
    return None


def refuse(wrong: Sequence[str], advice: str = "") -> None:
    """Raise StateError that lists these errors, if any."""
    if wrong:
        listed = "\n  ".join(wrong)
        raise StateError(f"the saved state does not fit{advice}:\n  {listed}")


def shorten(names: Sequence[str]) -> str:
    """Text such as `a, b, c and 38 more`."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
