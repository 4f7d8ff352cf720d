"""State dictionaries: plain tensors and numbers, by parameter name, one per rank.

Residuals differ between ranks, so each rank saves and loads its own. The file loads with
torch.load(weights_only=True). A residual is saved in its own type, and may be loaded into another.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from casync.runtime.deferral import as_torch
from hipress.channel.states import WORKER, Floats
from hipress.codecs import MEAN
from hipress.engine.residuals import Residuals, in_layout, in_shape
from hipress.errors import StateError
from hipress.model.params import Param
from hipress.state.checkpoint_compat import (
    check_names,
    check_owed,
    check_ranks,
    check_values,
    digest_of,
    stateful_params,
    text_of,
)
from hipress.state.checkpoint_format import FORMAT, check_format

log = logging.getLogger("hipress")


def export(
    residuals: Residuals,
    step: int,
    rank: int,
    world_size: int,
    owed: Mapping[int, torch.Tensor] = MappingProxyType({}),
    measured: str = "",
) -> dict[str, Any]:
    """A copy of this rank's state after `step` steps.

    owed: gradients of earlier plans, by parameter (see Engine); measured: of Measurements.
    """
    stateful, params = stateful_params(residuals), residuals.params
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
        "owed": {params[i].name: tensor_of(values, params[i]) for i, values in owed.items()},
        "sums": {},
        "measured": measured,
        "portable": False,
    }


def validate(
    residuals: Residuals, saved: Mapping[str, Any], rank: int, world_size: int, strict: bool
) -> list[Param]:
    """Parameters whose saved values fit.

    Raises StateError listing all entries that do not fit. If `strict` is false these are left out
    with a warning: their residuals start from zero.
    """
    check_format(saved)
    moved = check_ranks(saved, rank, world_size)
    good, bad = check_values(residuals, saved, aggregated=not moved)
    wrong = moved + check_names(residuals, saved) + bad
    wrong += check_owed(residuals.params, saved)[1]
    if wrong and strict:
        raise StateError(
            "the saved state does not fit this model (strict=False leaves out these entries; "
            'torch.distributed.checkpoint loses entries with "auto" and policies, whose keys it '
            "cannot know; torch.save and torch.load keep them):\n  " + "\n  ".join(wrong)
        )
    for message in wrong:
        log.warning("load_state_dict: %s; starts from zero", message)
    return [] if moved else good


def plan_of(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plan of a saved state, as of Plan.by_name."""
    check_format(saved)
    plan: Mapping[str, Any] = saved["plan"]
    return plan


def owed_of(residuals: Residuals, saved: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Owed gradients of a validated state that fit, by parameter: see Engine."""
    good, _ = check_owed(residuals.params, saved)
    return {param.index: _laid_out(saved["owed"][param.name], param).float() for param in good}


def means_of(saved: Mapping[str, Any], params: list[Param]) -> dict[str, str]:
    """A digest of the means of references that `restore` will load, which all ranks must share: see
    [Note: differences]. {} without any."""
    digest, some = hashlib.sha256(), False
    for param in params:
        mean = saved["state"].get(param.name, {}).get(WORKER, {}).get(MEAN)
        if mean is not None:
            digest.update(param.name.encode() + mean.contiguous().cpu().numpy().tobytes())
            some = True
    return {"the means of references to load": digest.hexdigest()[:16]} if some else {}


def _export_one(residuals: Residuals, param: Param) -> dict[str, dict[str, torch.Tensor]]:
    """The state of one parameter. Its keys do not depend on the training so far, since
    torch.distributed.checkpoint relies on them: an aggregator's exists if this rank may own
    elements; with buckets made later, always."""
    by_buckets = residuals.owned is None
    if param.index not in residuals.places and not by_buckets:  # not synchronized
        return {}
    return {
        side: {name: tensor_of(array, param) for name, array in arrays.items()}
        for side, arrays in residuals.whole(param.index).items()
        if side == WORKER or by_buckets or param.index in (residuals.owned or ())
    }


def tensor_of(array: Floats | torch.Tensor, param: Param) -> torch.Tensor:
    copy = as_torch(array).to("cpu", copy=True)
    if copy.numel() != param.numel:
        return copy
    return in_shape(copy, param).contiguous()


def restore(residuals: Residuals, saved: Mapping[str, Any], params: list[Param]) -> None:
    """Load the saved values of `params`, which fit; other states become zero, as at the start."""
    for param in params:
        if param.index not in residuals.places:
            # Scope "bucket": the first bucket with this parameter takes it from here.
            residuals.place(str(residuals.codec_of(param.index)), [param.index])
    good = {param.index for param in params}
    for index in residuals.places:
        param = residuals.params[index]
        values = saved["state"][param.name] if index in good else {}
        _fill_all(residuals, values, param)


def _fill_all(
    residuals: Residuals, saved: Mapping[str, Mapping[str, torch.Tensor]], param: Param
) -> None:
    for side, arrays in residuals.arrays(param.index).items():
        for name, array in arrays.items():
            values = saved.get(side, {}).get(name)
            if values is None:
                as_torch(array).zero_()
            else:
                spans = residuals.spans(param.index, side, name)
                _fill(array, spans.of(_laid_out(values, param).reshape(-1)))


def _laid_out(values: torch.Tensor, param: Param) -> torch.Tensor:
    """Values of a parameter in its own memory order, as in a bucket."""
    if tuple(values.shape) != param.shape:
        return values
    return in_layout(values, param)


def _fill(array: Floats, values: torch.Tensor) -> None:
    """Copy saved values, rounded or exact, in the type that the state has now, and finite."""
    target = as_torch(array)
    flat = values.reshape(-1).cpu().float()
    if target.dtype != torch.float32:
        most = torch.finfo(target.dtype).max
        flat = flat.clamp(-most, most)
    target.copy_(flat)
