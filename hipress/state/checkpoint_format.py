"""The format of a saved state, whatever its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hipress.channel.states import AGGREGATOR, WORKER
from hipress.errors import StateError, shown

FORMAT = 7
KEYS = {
    *("format", "step", "rank", "world_size", "plan", "measured", "portable"),
    *("codecs", "compressors", "strategies", "state", "owed", "sums"),
}
KEYS_OF_MAPPINGS = {"plan", "codecs", "compressors", "strategies", "state", "owed", "sums"}
#: older formats that can be read, and their keys: 6 had neither measurements nor owed gradients,
#: and with `ring` and `gtopk` all states were workers'
OLDER = {6: KEYS - {"measured", "owed", "portable", "sums"}}
SIDES = (WORKER, AGGREGATOR)


def portable_state(step: int, **entries: Any) -> dict[str, Any]:
    """A portable state, of no rank and no codec but for these entries: see [Note: portable states]
    in portable.py."""
    empty: dict[str, Any] = {key: {} for key in KEYS} | {"rank": 0, "world_size": 0, "measured": ""}
    return empty | {"format": FORMAT, "step": step, "portable": True} | entries


def check_format(saved: object) -> None:
    """Raise StateError for an object that `export` never wrote, in this version or an older one."""
    if not isinstance(saved, Mapping):
        raise StateError(f"not a state of hipress.state_dict but a {type(saved).__name__}")
    number = saved.get("format")
    keys = OLDER.get(number, KEYS) if isinstance(number, int) else KEYS
    if type(number) is int and number not in (FORMAT, *OLDER):
        other = "hipress 0.1.0 reads 1 to 6" if number < FORMAT else "a later version wrote it"
        raise StateError(
            f"state format {shown(number)}; this version reads 6 and {FORMAT}, {other}"
        )
    if set(saved) != keys:
        names = sorted(map(str, saved))
        raise StateError(f"not a state of hipress.state_dict: expected {sorted(keys)}, got {names}")
    if type(number) is not int:
        raise StateError(f"damaged state: format {shown(number)} is no number")
    _check_types(saved)


def _check_types(saved: Mapping[str, Any]) -> None:
    """Raise StateError for types that `export` never writes, before anything is loaded."""
    step = saved["step"]
    if type(step) is not int or not 0 <= step < 2**63:
        raise StateError(f"damaged state: step {shown(step)} is no number of steps")
    for key in ("rank", "world_size"):
        if type(saved[key]) is not int:
            raise StateError(f"damaged state: {key} {shown(saved[key])} is no whole number")
    for key in KEYS_OF_MAPPINGS & set(saved):
        if not isinstance(saved[key], Mapping):
            raise StateError(f"damaged state: {key} is a {type(saved[key]).__name__}, not a dict")
    named = (saved["plan"], saved["state"], saved.get("owed", {}))
    if not all(isinstance(name, str) for each in named for name in each):
        raise StateError("damaged state: a name of a parameter is no text")
    if not all(map(_is_way, saved["plan"].values())):
        raise StateError("damaged state: plan: expected a codec, a strategy and partitions")
    for key in ("codecs", "compressors", "strategies"):
        if not all(isinstance(each, str) for pair in saved[key].items() for each in pair):
            raise StateError(f"damaged state: {key}: expected texts by name")
    if type(saved.get("portable", False)) is not bool:
        raise StateError("damaged state: portable: expected True or False")
    if not isinstance(saved.get("measured", ""), str):
        raise StateError("damaged state: measured: expected a text")
    if not all(isinstance(each, torch.Tensor) for each in saved.get("owed", {}).values()):
        raise StateError("damaged state: owed: expected tensors by name")
    if not all(map(_are_factors, saved.get("sums", {}).values())):
        raise StateError("damaged state: sums: expected factors by name of a state")
    for name, sides in saved["state"].items():
        if not _tensors_by_side(sides):
            raise StateError(f"damaged state: {name}: expected tensors by side and name")


def _are_factors(each: object) -> bool:
    return isinstance(each, Mapping) and all(isinstance(value, float) for value in each.values())


def _is_way(way: object) -> bool:
    """True for an entry of Plan.by_name, whose last number need not be there."""
    kinds = [str, str, int, int, int]
    if not isinstance(way, list) or len(way) not in (4, 5):
        return False
    return [type(each) for each in way] == kinds[: len(way)] and way[2] > 0 and way[-1] >= 0


def _tensors_by_side(sides: object) -> bool:
    return isinstance(sides, Mapping) and all(
        side in SIDES
        and isinstance(values, Mapping)
        and all(isinstance(value, torch.Tensor) for value in values.values())
        for side, values in sides.items()
    )
