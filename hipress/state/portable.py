"""States for any number of ranks, which are the same on all of them.

[Note: portable states] A state for each rank continues a training bit for bit, and only with as
many ranks. A portable one holds the mean over the ranks of what each has not delivered, as a
gradient: each rank of the new training adds it to its next gradient, so the average gets exactly
that, whatever their number, codec and strategy. Of the other states, those that are the same on all
ranks are kept, and the others as their mean over the ranks (a momentum, say), for parameters that
have the same codec again; with another, what they hold back by the spec's `owed:` is delivered as a
gradient, too. Where ranks encode 1/N of their gradients, so are such states of 1/N of a
gradient: they are saved as of a whole one, and loaded as of 1/N for the new N.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from casync import strategies
from casync.codec import StateField
from casync.runtime.deferral import as_torch
from hipress.channel.states import WORKER
from hipress.engine.residuals import Residuals
from hipress.errors import StateError
from hipress.model.params import Param
from hipress.ranks.link import Mean
from hipress.state.checkpoint import export, tensor_of
from hipress.state.checkpoint_compat import check_owed, check_shapes, digest_of, shorten
from hipress.state.checkpoint_format import portable_state

if TYPE_CHECKING:
    from hipress.choose.plan_controller import PlanController

log = logging.getLogger("hipress")


def export_portable(
    residuals: Residuals,
    step: int,
    owed: Mapping[int, torch.Tensor],
    measured: str,
    mean: Mean,
    *,
    sharded: bool,
) -> dict[str, Any]:
    """The state after `step` steps. All ranks must call this.

    owed: gradients of earlier plans, by parameter (see Engine); measured: of Measurements.
    sharded: leave out codecs' other states, whose plans may differ between shards.
    """
    others, sums, undelivered = {}, {}, {}
    held = partial(_undelivered, residuals, owed=owed, sums=sharded)
    some = mean.where_any(map(held, residuals.params))
    for param, is_owed in zip(residuals.params, some, strict=True):
        if is_owed and (average := mean(held(param))).any():
            undelivered[param.name] = tensor_of(average, param)
        states = {} if sharded else _others(residuals, param, mean)
        if states:
            others[param.name] = {WORKER: states}
            sums[param.name] = _factors(residuals, param)
    if sharded:
        return portable_state(step, measured=measured, owed=undelivered)
    whole = export(Residuals(residuals.params, residuals.plan), step, 0, 0, measured=measured)
    factors_by_name = {name: factors for name, factors in sums.items() if factors}
    return whole | {"portable": True, "state": others, "sums": factors_by_name, "owed": undelivered}


def _undelivered(
    residuals: Residuals, param: Param, *, owed: Mapping[int, torch.Tensor], sums: bool
) -> torch.Tensor:
    """A parameter's gradient that this rank has not delivered: flat float32 on the host."""
    gradient = torch.zeros(param.numel)
    for part in (residuals.undelivered(param.index, sums=sums), owed.get(param.index)):
        if part is not None:
            gradient += part.cpu()
    return gradient


def _factors(residuals: Residuals, param: Param) -> dict[str, float]:
    """The gradient of which a unit of each other state is, by name."""
    codec = residuals.plan.codecs[str(residuals.codec_of(param.index))]
    return {state.name: state.gradient for state in codec.states if state.gradient}


def _others(residuals: Residuals, param: Param, mean: Mean) -> dict[str, torch.Tensor]:
    """A parameter's other states, by name."""
    key = residuals.codec_of(param.index)
    if key is None or param.index not in residuals.places:
        return {}
    arrays, others = residuals.arrays(param.index)[WORKER], {}
    for state in residuals.plan.codecs[key].states:
        values = as_torch(arrays[state.name]).cpu().float()
        if state.fate == "mean":
            whole = mean(values) * _shares(residuals, param, state)
            others[state.name] = tensor_of(whole, param)
        elif state.fate == "same":
            others[state.name] = tensor_of(values, param)
    return others


def _shares(residuals: Residuals, param: Param, state: StateField) -> int:
    """The number of ranks, if a state is of a rank's share of the mean gradient; else 1."""
    decision = residuals.plan.decisions[param.index]
    codec = residuals.plan.codecs[str(decision.codec)]
    share = strategies.encodes_shares(decision.strategy, codec) and state.per == "element"
    return residuals.plan.topology.world_size if share and state.fate == "mean" else 1


def without_sums(saved: Mapping[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    """A portable state in which the sums of all but these parameters' codecs are owed as gradients.
    Raises StateError for a damaged one."""
    owed = dict(saved["owed"])
    for name in saved["sums"].keys() - set(but):
        for field, factor in saved["sums"][name].items():
            values = saved["state"].get(name, {}).get(WORKER, {}).get(field)
            if values is None or (name in owed and values.shape != owed[name].shape):
                raise StateError(f"damaged state: {name}: {field} is missing, or of another shape")
            owed[name] = owed.get(name, 0) + values.float() * factor
    return {**saved, "owed": owed}


def own_shares(
    residuals: Residuals, saved: Mapping[str, Any], params: Sequence[Param]
) -> dict[str, Any]:
    """A saved state with the other states of these parameters as this rank keeps them."""
    states_by_name = dict(saved["state"])
    for param in params:
        key = str(residuals.codec_of(param.index))
        states = {each.name: each for each in residuals.plan.codecs[key].states}
        states_by_name[param.name] = {
            side: {
                name: values / _shares(residuals, param, states[name])
                for name, values in arrays.items()
            }
            for side, arrays in states_by_name[param.name].items()
        }
    return {**saved, "state": states_by_name}


def portable_params(residuals: Residuals, saved: Mapping[str, Any], *, strict: bool) -> list[Param]:
    """Parameters whose states other than undelivered gradients can go on. Raises StateError for
    undelivered gradients that do not fit; if `strict` is false, these are left out with a warning.
    """
    _, wrong = check_owed(residuals.params, without_sums(saved))
    good, others = [], []
    for param in residuals.params:
        key, states = residuals.codec_of(param.index), saved["state"].get(param.name)
        if states is None:
            continue
        if key is None or saved["codecs"].get(param.name) != digest_of(residuals, key):
            others.append(param.name)
        elif problems := check_shapes(residuals, key, param, states):
            wrong += problems
        else:
            good.append(param)
    if wrong and strict:
        raise StateError("the saved state does not fit this model:\n  " + "\n  ".join(wrong))
    for message in wrong:
        log.warning("load_state_dict: %s; left out", message)
    if others:
        log.info(
            "load_state_dict: %s: another codec, or none; gradient that the saved one held back is "
            "delivered, its other states start anew", shorten(others),
        )  # fmt: skip
    return good


def load_measured(tuner: PlanController | None, measured: str) -> None:
    """Let a policy go on with a state's measurements, if they are its own."""
    try:
        if measured and (tuner is None or tuner.measurements is None):
            raise StateError("there is no policy here")
        if measured and tuner is not None and tuner.measurements is not None:
            tuner.measurements.load(measured)
    except StateError as error:
        log.info("load_state_dict: measurements of the saved policy are left out: %s", error)
