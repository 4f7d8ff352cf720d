"""State dictionaries: plain tensors and numbers, by parameter name, one per rank.

Residuals differ from rank to rank, so each rank saves and loads its own. The file loads with
torch.load(weights_only=True). A residual is saved in the type that it has, and may be loaded where
it has another one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from casync.runtime.deferral import as_torch
from hipress.errors import StateError
from hipress.model import Param
from hipress.sync.fitting import (
    check_names,
    check_ranks,
    check_values,
    digest_of,
    stateful_params,
    text_of,
)
from hipress.sync.formats import FORMAT, check_format
from hipress.sync.state import WORKER, Floats, Residuals, in_layout, in_shape

log = logging.getLogger("hipress")


def export(residuals: Residuals, step: int, rank: int, world_size: int) -> dict[str, Any]:
    """The state of this rank after `step` steps, copied."""
    stateful = stateful_params(residuals)
    return {
        "format": FORMAT,
        "step": step,
        "rank": rank,
        "world_size": world_size,
        "plan": residuals.plan.by_name,
        "codecs": {name: digest_of(residuals, key) for name, (_, key) in stateful.items()},
        "compressors": {name: text_of(residuals, key) for name, (_, key) in stateful.items()},
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
    check_format(saved)
    moved = check_ranks(saved, rank, world_size)
    good, bad = check_values(residuals, saved, aggregated=not moved and saved["format"] > 5)
    wrong = moved + check_names(residuals, saved) + bad
    if wrong and strict:
        raise StateError(
            "the saved state does not fit this model (strict=False leaves out what does not; "
            'what is missing after a load by torch.distributed.checkpoint, which with "auto" and '
            "policies cannot know all keys, torch.save and torch.load keep):\n  "
            + "\n  ".join(wrong)
        )
    for message in wrong:
        log.warning("load_state_dict: %s; starts from zero", message)
    return [] if moved else good


def plan_of(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plan that a state was saved by, as Plan.by_name has it; {} of an older format."""
    check_format(saved)
    plan: Mapping[str, Any] = saved.get("plan", {})
    return plan


def _export_one(residuals: Residuals, param: Param) -> dict[str, dict[str, torch.Tensor]]:
    """Whatever was trained, a state has the same keys, which torch.distributed.checkpoint goes by:
    an aggregator's where this rank may own elements: by buckets, as they are made, of any."""
    by_buckets = residuals.owned is None
    if param.index not in residuals.places and not by_buckets:  # nothing is synchronized
        return {}
    return {
        side: {name: _tensor(array, param) for name, array in arrays.items()}
        for side, arrays in residuals.pieces_or_zeros(param.index).items()
        if side == WORKER or by_buckets or param.index in (residuals.owned or ())
    }


def _tensor(array: Floats, param: Param) -> torch.Tensor:
    copy = as_torch(array).to("cpu", copy=True)
    if copy.numel() != param.numel:
        return copy
    return in_shape(copy, param).contiguous()


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
    return in_layout(values, param)


def _fill(array: Floats, values: torch.Tensor) -> None:
    """Saved values in the type that the state has now: rounded, or exactly, and finite."""
    kept = as_torch(array)
    flat = values.reshape(-1).cpu().float()
    if kept.dtype != torch.float32:
        most = torch.finfo(kept.dtype).max
        flat = flat.clamp(-most, most)
    kept.copy_(flat)
