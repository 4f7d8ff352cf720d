"""State dictionaries: plain tensors and numbers, by parameter name, one per rank.

Residuals differ from rank to rank, so each rank saves and loads its own. The file loads with
torch.load(weights_only=True). A residual is saved in the type that it has, and may be loaded where
it has another one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from casync.runtime.deferral import as_torch
from hipress.errors import StateError
from hipress.model import Param
from hipress.plan.codecs import described
from hipress.sync.state import AGGREGATOR, WORKER, Floats, Residuals

if TYPE_CHECKING:
    from casync.codec import Codec

FORMAT = 5
KEYS = {
    *("format", "step", "rank", "world_size", "plan"),
    *("codecs", "compressors", "strategies", "state"),
}
# Formats that are read, too: keys by number. Before 5 the plan was not told, before 4 codecs were
# known by their digests alone, before 3 values came as they lay in memory.
OLDER = {4: KEYS - {"plan"}}
OLDER |= {3: OLDER[4] - {"compressors"}, 2: OLDER[4] - {"compressors"}}
OLDER[1] = OLDER[2] - {"strategies"}
SIDES = (WORKER, AGGREGATOR)
NAMED = 5  # parameters, at most, in an error that several share
log = logging.getLogger("hipress")

Saved = dict[str, dict[str, dict[str, torch.Tensor]]]  # parameter -> side -> name -> values


def export(residuals: Residuals, step: int, rank: int, world_size: int) -> dict[str, Any]:
    """The state of this rank after `step` steps, copied."""
    stateful = _stateful(residuals)
    return {
        "format": FORMAT,
        "step": step,
        "rank": rank,
        "world_size": world_size,
        "plan": residuals.plan.by_name,
        "codecs": {name: _digest(residuals, key) for name, (_, key) in stateful.items()},
        "compressors": {name: _described(residuals, key) for name, (_, key) in stateful.items()},
        "strategies": {name: residuals.state_scheme(p.index) for name, (p, _) in stateful.items()},
        "state": {name: _export_one(residuals, param) for name, (param, _) in stateful.items()},
    }


def validate(
    residuals: Residuals, saved: Mapping[str, Any], rank: int, world_size: int, strict: bool
) -> list[Param]:
    """Parameters whose saved values fit.

    Raises StateError listing everything that does not. With `strict` false what does not
    fit is left out with a warning: those residuals start from zero.
    """
    _check_format(saved)
    moved = _check_ranks(saved, rank, world_size)
    good, bad = _check_values(residuals, saved, aggregated=not moved and saved["format"] > 1)
    wrong = moved + _check_names(residuals, saved) + bad
    if wrong and strict:
        raise StateError(
            "the saved state does not fit this model (strict=False leaves out what does not):\n  "
            + "\n  ".join(wrong)
        )
    for message in wrong:
        log.warning("load_state_dict: %s; starts from zero", message)
    return [] if moved else good


def names_fit(residuals: Residuals, saved: Mapping[str, Any]) -> bool:
    """Whether a state is of these parameters, codecs and strategies."""
    _check_format(saved)
    return not _check_names(residuals, saved)


def plan_of(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plan that a state was saved by, as Plan.by_name has it; {} of an older format."""
    _check_format(saved)
    plan: Mapping[str, Any] = saved.get("plan", {})
    return plan


def _stateful(residuals: Residuals) -> dict[str, tuple[Param, str]]:
    """Parameters of which there is state, by name, and their codecs' keys."""
    found: dict[str, tuple[Param, str]] = {}
    for param in residuals.params:
        key = residuals.codec_of(param.index)
        if key is not None and residuals.stateful(key):
            found[param.name] = (param, key)
    return found


def _digest(residuals: Residuals, key: str) -> str:
    return "/".join(codec.digest for codec in residuals.plan.both(key))


def _described(residuals: Residuals, key: str) -> str:
    return " and down ".join(described(codec) for codec in residuals.plan.both(key))


def _export_one(residuals: Residuals, param: Param) -> dict[str, dict[str, torch.Tensor]]:
    if param.index not in residuals.places:  # scope "bucket" before the first step
        return {}
    return {
        side: {name: _tensor(array, param) for name, array in arrays.items()}
        for side, arrays in residuals.pieces(param.index).items()
        if side == WORKER or _aggregates(residuals, param, arrays)
    }


def _aggregates(residuals: Residuals, param: Param, arrays: Mapping[str, Floats]) -> bool:
    """Whether to save an aggregator's values: of what other ranks own, they are zero. Whatever
    was trained, a state has the same keys, which torch.distributed.checkpoint goes by."""
    if residuals.owned is None:
        return any(array.any() for array in arrays.values())
    return param.index in residuals.owned


def _tensor(array: Floats, param: Param) -> torch.Tensor:
    copy = as_torch(array).to("cpu", copy=True)
    if copy.numel() != param.numel:
        return copy
    return copy.as_strided(param.shape, param.layout).contiguous()


def _check_format(saved: object) -> None:
    if not isinstance(saved, Mapping):
        raise StateError(f"not a state of hipress.state_dict but a {type(saved).__name__}")
    number = saved.get("format")
    keys = OLDER.get(number, KEYS) if isinstance(number, int) else KEYS
    if set(saved) != keys:
        found = sorted(map(str, saved))
        raise StateError(f"not a state of hipress.state_dict: expected {sorted(keys)}, got {found}")
    if number not in (FORMAT, *OLDER):
        raise StateError(f"state format {number!r}; this version reads 1 to {FORMAT}")
    _check_types(saved)


def _check_types(saved: Mapping[str, Any]) -> None:
    """Refuse what `export` never writes; "all or nothing" needs to know before it begins."""
    step = saved["step"]
    if type(step) is not int or not 0 <= step < 2**63:
        raise StateError(f"damaged state: step {step!r} is no number of steps")
    for key in {"plan", "codecs", "compressors", "strategies", "state"} & set(saved):
        if not isinstance(saved[key], Mapping):
            raise StateError(f"damaged state: {key} is a {type(saved[key]).__name__}, not a dict")
    if not all(_is_way(way) for way in saved.get("plan", {}).values()):
        raise StateError("damaged state: plan: expected a codec, a strategy and partitions")
    for name, sides in saved["state"].items():
        if not _tensors_by_side(sides):
            raise StateError(f"damaged state: {name}: expected tensors by side and name")


def _is_way(way: object) -> bool:
    kinds = [str, str, int, int]
    return isinstance(way, list) and [type(each) for each in way] == kinds and way[2] > 0


def _tensors_by_side(sides: object) -> bool:
    return isinstance(sides, Mapping) and all(
        side in SIDES
        and isinstance(values, Mapping)
        and all(isinstance(value, torch.Tensor) for value in values.values())
        for side, values in sides.items()
    )


def _check_ranks(saved: Mapping[str, Any], rank: int, world_size: int) -> list[str]:
    mine, its = (rank, world_size), (saved["rank"], saved["world_size"])
    if mine == its or not saved["codecs"]:
        return []
    message = f"saved by rank {its[0]} of {its[1]}, this is rank {mine[0]} of {mine[1]}"
    return [message + ("; every rank saves and loads its own" if mine[1] == its[1] else "")]


def _check_names(residuals: Residuals, saved: Mapping[str, Any]) -> list[str]:
    here = _stateful(residuals)
    there: Mapping[str, str] = saved["codecs"]
    wrong = [f"{name}: missing from the saved state" for name in here if name not in there]
    wrong += [f"{name}: has no codec state here" for name in there if name not in here]
    others: dict[str, list[str]] = {}
    for name, (param, key) in here.items():
        if name in there and (other := _other(residuals, saved, param, key)):
            others.setdefault(other, []).append(name)
    return wrong + [f"{_shortened(names)}: {other}" for other, names in others.items()]


def _shortened(names: Sequence[str]) -> str:
    """Such as `a, b, c and 38 more`."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _other(residuals: Residuals, saved: Mapping[str, Any], param: Param, key: str) -> str | None:
    """Of which other codec or strategy a parameter's saved values are, or None."""
    name, here = param.name, residuals.state_scheme(param.index)
    if saved["codecs"].get(name) != _digest(residuals, key):
        before = saved.get("compressors", {}).get(name, "another codec")
        now = _described(residuals, key)
        return f"saved with {before}{' of another spec' * (before == now)}, this is {now}"
    before = saved.get("strategies", {}).get(name, here)  # format 1 does not tell
    return None if before == here else f"saved with strategy {before}, this is {here}"


def _check_values(
    residuals: Residuals, saved: Mapping[str, Any], *, aggregated: bool
) -> tuple[list[Param], list[str]]:
    """Parameters whose values fit, and what is wrong with values of the others.

    aggregated: whether all that this rank aggregates must be there (format 1 left out zeros).
    """
    good, wrong = [], []
    state: Saved = saved["state"]
    for name, (param, codec) in _stateful(residuals).items():
        if _other(residuals, saved, param, codec):
            continue
        if name not in state:
            wrong.append(f"{name}: its values are missing from the saved state")
            continue
        wanted = {side: _wanted(residuals.codec_at(codec, side), param) for side in SIDES}
        problems = [
            f"{name}: {side} values are missing from the saved state"
            for side in _needed(residuals, state[name], param, aggregated)
            if side not in state[name]
        ]
        problems += [
            f"{name}: {side} {key}: expected {wanted[side].get(key)}, got {shape}"
            for side, values in state[name].items()
            for key, shape in _shapes(values, wanted[side]).items()
            if shape != wanted[side].get(key)
        ]
        problems += [
            f"{name}: {side} {key}: {problem}"
            for side, values in state[name].items()
            for key, value in values.items()
            if (problem := _unusable(value))
        ]
        wrong += problems
        if not problems:
            good.append(param)
    return good, wrong


def _needed(
    residuals: Residuals, saved: Mapping[str, Any], param: Param, aggregated: bool
) -> list[str]:
    """Sides that `export` always writes; with scope "bucket" none before the first step."""
    if residuals.owned is None:
        return [WORKER] if saved else []
    owned = aggregated and param.index in residuals.owned
    return [side for side in residuals.pieces(param.index) if side == WORKER or owned]


def _wanted(codec: Codec, param: Param) -> dict[str, tuple[int, ...]]:
    """Shapes of a side's values."""
    return {key: _size(v, param) for key, v in codec.init_state(param.numel).items()}


def _size(array: Floats, param: Param) -> tuple[int, ...]:
    return param.shape if array.size == param.numel else tuple(array.shape)


def _shapes(
    values: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...] | None]:
    found: dict[str, tuple[int, ...] | None] = dict.fromkeys(wanted)
    found.update({key: tuple(value.shape) for key, value in values.items()})
    return found


def restore(residuals: Residuals, saved: Mapping[str, Any], params: list[Param]) -> None:
    """The saved values of `params`, which fit; those of all others become zero, as at the start."""
    laid_out = saved["format"] < 3  # in the order in which the parameter's lie in memory
    for param in params:
        if param.index not in residuals.places:
            # Scope "bucket": the first bucket with this parameter takes it from here.
            residuals.place(str(residuals.codec_of(param.index)), [param.index])
    good = {param.index for param in params}
    for index in residuals.places:
        param = residuals.params[index]
        values = saved["state"][param.name] if index in good else {}
        _fill_all(residuals.pieces(index), values, None if laid_out else param)


def _unusable(values: torch.Tensor) -> str | None:
    """Why these are no values of a state, which are floats, and finite whatever gradients were."""
    plain = values.layout == torch.strided and values.device.type != "meta"
    if not (plain and values.is_floating_point()):
        kind = f"{values.dtype} {values.layout} on {values.device}".replace("torch.", "")
        return f"expected floats in memory, got {kind}"
    if not values.float().isfinite().all():  # it would reach every rank in the next step
        return "damaged: a value is NaN or infinite"
    return None


def _fill_all(
    pieces: Mapping[str, Mapping[str, Floats]],
    saved: Mapping[str, Mapping[str, torch.Tensor]],
    param: Param | None,
) -> None:
    for side, arrays in pieces.items():
        for name, array in arrays.items():
            values = saved.get(side, {}).get(name)
            if values is None:
                as_torch(array).zero_()
            else:
                _fill(array, values if param is None else _laid_out(values, param))


def _laid_out(values: torch.Tensor, param: Param) -> torch.Tensor:
    """Values of a parameter in the order in which its own lie in memory, and in a bucket."""
    if tuple(values.shape) != param.shape:
        return values
    laid = torch.empty_strided(param.shape, param.layout, dtype=values.dtype)
    return laid.copy_(values).as_strided((param.numel,), (1,))


def _fill(array: Floats, values: torch.Tensor) -> None:
    """Saved values in the type that the state has now: rounded, or exactly, and finite."""
    kept = as_torch(array)
    flat = values.reshape(-1).cpu().float()
    if kept.dtype != torch.float32:
        most = torch.finfo(kept.dtype).max
        flat = flat.clamp(-most, most)
    kept.copy_(flat)
