"""Checks that a saved state fits the present parameters, codecs and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from casync.codec import Codec
from hipress.channel.states import WORKER
from hipress.codecs import full_name
from hipress.engine.residuals import Residuals
from hipress.model.params import Param

NAMED = 5  # most parameter names in a shared error

Saved = dict[str, dict[str, dict[str, torch.Tensor]]]  # parameter -> side -> name -> values


def stateful_params(residuals: Residuals) -> dict[str, tuple[Param, str]]:
    """Parameters with state, by name, and their codecs' keys."""
    stateful: dict[str, tuple[Param, str]] = {}
    for param in residuals.params:
        key = residuals.codec_of(param.index)
        if key is not None and residuals.stateful(key):
            stateful[param.name] = (param, key)
    return stateful


def digest_of(residuals: Residuals, key: str) -> str:
    """Digest of a codec, with that of the owners' codec if it is another."""
    return "/".join(codec.digest for codec in residuals.plan.both(key))


def text_of(residuals: Residuals, key: str) -> str:
    """Text of a codec, with that of the owners' codec if it is another."""
    return " and down ".join(full_name(codec) for codec in residuals.plan.both(key))


def check_ranks(saved: Mapping[str, Any], rank: int, world_size: int) -> list[str]:
    """Errors if the state is of another rank or another number of ranks."""
    mine, its = (rank, world_size), (saved["rank"], saved["world_size"])
    if mine == its or not saved["codecs"]:
        return []
    message = f"saved by rank {its[0]} of {its[1]}, this is rank {mine[0]} of {mine[1]}"
    return [message + ("; every rank saves and loads its own" if mine[1] == its[1] else "")]


def check_names(residuals: Residuals, saved: Mapping[str, Any]) -> list[str]:
    """Errors in names of parameters, codecs and strategies."""
    here = stateful_params(residuals)
    there: Mapping[str, str] = saved["codecs"]
    others: dict[str, list[str]] = {}
    for name, (param, key) in here.items():
        if name not in there:
            others.setdefault(_without(residuals, saved, name, key), []).append(name)
        elif other := _other(residuals, saved, param, key):
            others.setdefault(other, []).append(name)
    for name in {**there, **saved["state"]}:
        if name not in here:
            others.setdefault(_unwanted(residuals, saved, name), []).append(name)
    return [f"{shorten(names)}: {other}" for other, names in others.items()]


def _without(residuals: Residuals, saved: Mapping[str, Any], name: str, key: str) -> str:
    """Text for a parameter without values in the saved state. key: of its codec here."""
    before = saved.get("plan", {}).get(name, [key])[0]
    if before == key:
        return "missing from the saved state"
    before = before or "no compressor"
    return f"saved with {before}, which keeps no state, this is {text_of(residuals, key)}"


def _unwanted(residuals: Residuals, saved: Mapping[str, Any], name: str) -> str:
    """Text for a parameter whose saved values have no use here."""
    before = saved.get("compressors", {}).get(name, "another compressor")
    index = next((param.index for param in residuals.params if param.name == name), None)
    if index is None:
        return f"saved with {before}, and there is no such parameter here"
    key = residuals.codec_of(index)
    now = "no compressor" if key is None else text_of(residuals, key)
    return f"saved with {before}, this is {now}, which keeps no state"


def shorten(names: Sequence[str]) -> str:
    """Text such as `a, b, c and 38 more`."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _other(residuals: Residuals, saved: Mapping[str, Any], param: Param, key: str) -> str | None:
    """Text if a parameter's values were saved with another codec or strategy, or None."""
    name, here = param.name, residuals.state_scheme(param.index)
    if saved["codecs"].get(name) != digest_of(residuals, key):
        before = saved["compressors"].get(name, "another codec")
        now = text_of(residuals, key)
        return f"saved with {before}{' of another spec' * (before == now)}, this is {now}"
    before = saved["strategies"].get(name, here)
    if saved["format"] == 6 and before.startswith(("ring", "gtopk")):
        return (
            f"saved by hipress 0.1, where owners with strategy {before} kept no state of their own"
        )
    return None if before == here else f"saved with strategy {before}, this is {here}"


def check_values(
    residuals: Residuals, saved: Mapping[str, Any], *, aggregated: bool
) -> tuple[list[Param], list[str]]:
    """Parameters whose values fit, and errors in the values of the others.

    aggregated: True if all that this rank aggregates must be there.
    """
    good, wrong = [], []
    state: Saved = saved["state"]
    for name, (param, codec) in stateful_params(residuals).items():
        if _other(residuals, saved, param, codec):
            continue
        if name not in state:
            wrong.append(f"{name}: its values are missing from the saved state")
            continue
        problems = [
            f"{name}: {side} values are missing from the saved state"
            for side in _needed(residuals, state[name], param, aggregated)
            if side not in state[name]
        ]
        problems += check_shapes(residuals, codec, param, state[name], whole=True)
        wrong += problems
        if not problems:
            good.append(param)
    return good, wrong


def check_shapes(
    residuals: Residuals,
    key: str,
    param: Param,
    saved: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    whole: bool = False,
) -> list[str]:
    """Errors in a parameter's values, by side and name. whole: no state of a side may lack."""
    wrong = []
    for side, values in saved.items():
        plan = residuals.plan
        wanted = _wanted(plan.codecs[key] if side == WORKER else plan.down(key), param)
        names = dict.fromkeys(wanted) if whole else {}
        shapes = names | {name: tuple(value.shape) for name, value in values.items()}
        wrong += [
            f"{param.name}: {side} {name}: expected {wanted.get(name)}, got {shape}"
            for name, shape in shapes.items()
            if shape != wanted.get(name)
        ]
        wrong += [
            f"{param.name}: {side} {name}: {problem}"
            for name, value in values.items()
            if (problem := _unusable(value))
        ]
    return wrong


def check_owed(params: Sequence[Param], saved: Mapping[str, Any]) -> tuple[list[Param], list[str]]:
    """Parameters whose owed gradients fit, and errors in those of the others."""
    named = {param.name: param for param in params}
    good, wrong = [], []
    for name, values in saved.get("owed", {}).items():
        param = named.get(name)
        if param is None:
            wrong.append(f"{name}: owed a gradient, and is no parameter here")
        elif tuple(values.shape) != param.shape:
            wrong.append(f"{name}: owed: expected {param.shape}, got {tuple(values.shape)}")
        elif problem := _unusable(values):
            wrong.append(f"{name}: owed: {problem}")
        else:
            good.append(param)
    return good, wrong


def _needed(
    residuals: Residuals, saved: Mapping[str, Any], param: Param, aggregated: bool
) -> list[str]:
    """Sides that `export` always writes; with scope "bucket" it once wrote none before the first
    step, and no aggregator's zeros."""
    if residuals.owned is None:
        return [WORKER] if saved else []
    owned = aggregated and param.index in residuals.owned
    return [side for side in residuals.arrays(param.index) if side == WORKER or owned]


def _wanted(codec: Codec, param: Param) -> dict[str, tuple[int, ...]]:
    """Shapes of a side's values."""
    return {
        s.name: param.shape if s.per == "element" or param.numel == 1 else (1,)
        for s in codec.states
    }


def _unusable(values: torch.Tensor) -> str | None:
    """The reason why these cannot be values of a state, which are finite floats; or None."""
    plain = values.layout == torch.strided and values.device.type != "meta"
    if not (plain and values.is_floating_point()):
        kind = f"{values.dtype} {values.layout} on {values.device}".replace("torch.", "")
        return f"expected floats in memory, got {kind}"
    if not values.float().isfinite().all():  # they would reach every rank in the next step
        return "damaged: a value is NaN or infinite"
    return None
