"""Records of a module's gradients: this rank's own, and portable ones.

[Note: portable states] A record of each rank continues a training bit for bit, and only with as
many ranks. A portable one holds the mean over the ranks of what each has not delivered, as a
gradient: each rank of the new training adds it to its next gradient, so the average gets exactly
that, whatever their number, codec and strategy. Of the other states, those that are the same on all
ranks are kept, and the others as their mean over the ranks (a momentum, say), for parameters that
have the same codec again; with another, what they hold back by the spec's `owed:` is delivered as a
gradient, too. Where ranks encode 1/N of their gradients, so are such states of 1/N of a
gradient: they are saved as of a whole one, and loaded as of 1/N for the new N.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from casync import strategies
from casync.codec import Codec, StateField
from casync.runtime.deferral import as_torch
from hipress.channel.records import (
    GRADIENTS,
    Entry,
    check_place,
    check_shapes,
    check_states,
    check_undelivered,
    make_record,
    refuse,
    shorten,
)
from hipress.channel.states import WORKER, Floats
from hipress.codecs import MEAN, full_name
from hipress.engine.residuals import Residuals, in_layout, in_shape
from hipress.errors import StateError
from hipress.model.params import Param
from hipress.ranks.groups import Mean

if TYPE_CHECKING:
    from hipress.choose.chooser import Chooser

log = logging.getLogger("hipress")

NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


def export(
    place: Sequence[int],
    residuals: Residuals,
    step: int,
    undelivered: Mapping[int, torch.Tensor] = NOTHING,
    measured: str = "",
) -> dict[str, Any]:
    """This rank's record after `step` steps.

    place: rank and number of ranks. undelivered: gradients of earlier plans, flat, by parameter
    (see Engine). measured: of PolicyState.
    """
    entries, params = residual_entries(residuals), residuals.params
    named = {param.name: param for param in params}
    return make_record(
        GRADIENTS,
        step,
        place=[*place],
        plan=residuals.plan.by_name,
        codecs={name: entry.told() for name, entry in entries.items()},
        states={name: _export_one(residuals, named[name], entries[name]) for name in entries},
        undelivered={params[i].name: tensor_of(each, params[i]) for i, each in undelivered.items()},
        more={"measured": measured},
    )


def _export_one(
    residuals: Residuals, param: Param, entry: Entry
) -> dict[str, dict[str, torch.Tensor]]:
    """The states of one parameter. Their keys do not depend on the training so far, since
    torch.distributed.checkpoint relies on them."""
    if not entry.needed:
        return {}
    return {
        side: {name: tensor_of(array, param) for name, array in arrays.items()}
        for side, arrays in residuals.whole(param.index).items()
        if side in entry.needed
    }


def tensor_of(array: Floats | torch.Tensor, param: Param) -> torch.Tensor:
    """A copy on the host of a parameter's flat values, in its shape; of one number, if it is."""
    copy = as_torch(array).to("cpu", copy=True)
    if copy.numel() != param.numel:
        return copy
    return in_shape(copy, param).contiguous()


def residual_entries(residuals: Residuals) -> dict[str, Entry]:
    """The parameters with states, by name."""
    return {
        param.name: _entry(residuals, param, key)
        for param in residuals.params
        if (key := residuals.codec_of(param.index)) is not None and residuals.stateful(key)
    }


def _entry(residuals: Residuals, param: Param, key: str) -> Entry:
    codecs = residuals.codecs_of(key)
    if residuals.owned is None:  # buckets decide later who owns it
        needed = tuple(codecs)
    elif param.index not in residuals.places:  # not synchronized
        needed = ()
    else:
        mine = param.index in residuals.owned
        needed = tuple(side for side in codecs if side == WORKER or mine)
    return Entry(
        key=key,
        digest="/".join(codec.digest for codec in residuals.plan.both(key)),
        text=_text(residuals, key),
        scheme=residuals.state_scheme(param.index),
        shapes={side: _shapes(codec, param) for side, codec in codecs.items()},
        needed=needed,
    )


def _text(residuals: Residuals, key: str | None) -> str:
    """Text on a codec, with that of the owners' codec if it is another."""
    if key is None:
        return "no compressor"
    return " and down ".join(full_name(codec) for codec in residuals.plan.both(key))


def _shapes(codec: Codec, param: Param) -> dict[str, tuple[int, ...]]:
    return {
        s.name: param.shape if s.per == "element" or param.numel == 1 else (1,)
        for s in codec.states
    }


def validate(
    residuals: Residuals, saved: Mapping[str, Any], place: Sequence[int], *, strict: bool
) -> list[Param]:
    """Parameters whose saved states fit, of this rank's own record.

    Raises StateError listing all entries that do not fit. If `strict` is false these are left out
    with a warning: their residuals start from zero.
    """
    moved = check_place(saved, place)
    entries, params = residual_entries(residuals), residuals.params
    others = {p.name: _text(residuals, residuals.codec_of(p.index)) for p in params}
    good, bad = check_states(saved, entries, others, moved=bool(moved))
    wrong = moved + bad + check_undelivered(saved, _shapes_by_name(params))[1]
    if strict:
        refuse(
            wrong,
            " this model (strict=False leaves out these entries; torch.distributed.checkpoint "
            'loses entries with "auto" and policies, whose keys it cannot know; torch.save and '
            "torch.load keep them)",
        )
    for message in wrong:
        log.warning("load_state_dict: %s; starts from zero", message)
    return [param for param in params if param.name in good and not moved]


def undelivered_of(residuals: Residuals, saved: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Undelivered gradients of a record that fit, flat, by parameter: see Engine."""
    names, _ = check_undelivered(saved, _shapes_by_name(residuals.params))
    return {
        param.index: in_layout(saved["undelivered"][param.name], param).float()
        for param in residuals.params
        if param.name in names
    }


def _shapes_by_name(params: Sequence[Param]) -> dict[str, tuple[int, ...]]:
    return {param.name: tuple(param.shape) for param in params}


def means_of(saved: Mapping[str, Any], params: Sequence[Param]) -> dict[str, str]:
    """A digest of the means of references that `restore` will load, which all ranks must share: see
    [Note: differences]. {} without any."""
    digest, some = hashlib.sha256(), False
    for param in params:
        mean = saved["states"].get(param.name, {}).get(WORKER, {}).get(MEAN)
        if mean is not None:
            digest.update(param.name.encode() + mean.contiguous().cpu().numpy().tobytes())
            some = True
    return {"the means of references to load": digest.hexdigest()[:16]} if some else {}


def restore(residuals: Residuals, saved: Mapping[str, Any], params: Sequence[Param]) -> None:
    """Load the saved states of `params`, which fit; others become zero, as at the start."""
    for param in params:
        if param.index not in residuals.places:
            # Scope "bucket": the first bucket with this parameter takes it from here.
            residuals.place(str(residuals.codec_of(param.index)), [param.index])
    residuals.restore(
        {
            param.index: {
                side: {name: _flat(values, param) for name, values in arrays.items()}
                for side, arrays in saved["states"][param.name].items()
            }
            for param in params
        }
    )


def _flat(values: torch.Tensor, param: Param) -> torch.Tensor:
    """Values of a parameter in its own memory order, as in a bucket."""
    return in_layout(values, param) if tuple(values.shape) == param.shape else values


def export_portable(
    residuals: Residuals,
    step: int,
    undelivered: Mapping[int, torch.Tensor],
    measured: str,
    mean: Mean,
    *,
    sharded: bool,
) -> dict[str, Any]:
    """The portable record after `step` steps. All ranks must call this.

    undelivered, measured: as for `export`. sharded: leave out codecs' other states, whose plans may
    differ between shards.
    """
    others, sums, gradients = {}, {}, {}
    held = partial(_undelivered, residuals, earlier=undelivered, sums=sharded)
    some = mean.where_any(map(held, residuals.params))
    for param, holds in zip(residuals.params, some, strict=True):
        if holds and (average := mean(held(param))).any():
            gradients[param.name] = tensor_of(average, param)
        states = {} if sharded else _others(residuals, param, mean)
        if states:
            others[param.name] = {WORKER: states}
            sums[param.name] = _factors(residuals, param)
    more = {"measured": measured}
    if sharded:
        return make_record(GRADIENTS, step, portable=True, undelivered=gradients, more=more)
    return make_record(
        GRADIENTS,
        step,
        portable=True,
        plan=residuals.plan.by_name,
        codecs={name: entry.told() for name, entry in residual_entries(residuals).items()},
        states=others,
        sums={name: factors for name, factors in sums.items() if factors},
        undelivered=gradients,
        more=more,
    )


def _undelivered(
    residuals: Residuals, param: Param, *, earlier: Mapping[int, torch.Tensor], sums: bool
) -> torch.Tensor:
    """A parameter's gradient that this rank has not delivered: flat float32 on the host."""
    gradient = torch.zeros(param.numel, device="cpu")
    for part in (residuals.undelivered(param.index, sums=sums), earlier.get(param.index)):
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
    """A portable record in which the sums of all but these parameters' codecs are undelivered
    gradients. Raises StateError for a damaged one."""
    undelivered = dict(saved["undelivered"])
    for name in saved["sums"].keys() - set(but):
        for field, factor in saved["sums"][name].items():
            values = saved["states"].get(name, {}).get(WORKER, {}).get(field)
            before = undelivered.get(name, values)
            if values is None or values.shape != before.shape:
                raise StateError(f"damaged state: {name}: {field} is missing, or of another shape")
            undelivered[name] = undelivered.get(name, 0) + values.float() * factor
    return {**saved, "undelivered": undelivered}


def own_shares(
    residuals: Residuals, saved: Mapping[str, Any], params: Sequence[Param]
) -> dict[str, Any]:
    """A portable record with the other states of these parameters as this rank keeps them."""
    states_by_name = dict(saved["states"])
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
    return {**saved, "states": states_by_name}


def portable_params(residuals: Residuals, saved: Mapping[str, Any], *, strict: bool) -> list[Param]:
    """Parameters whose states other than undelivered gradients can go on. Raises StateError for
    undelivered gradients that do not fit; if `strict` is false, these are left out with a warning.
    """
    _, wrong = check_undelivered(without_sums(saved), _shapes_by_name(residuals.params))
    good, others, entries = [], [], residual_entries(residuals)
    for param in residuals.params:
        states, entry = saved["states"].get(param.name), entries.get(param.name)
        if states is None:
            continue
        digest, *_ = saved["codecs"].get(param.name, [""])
        if entry is None or entry.digest != digest:
            others.append(param.name)
        elif problems := check_shapes(entry, states):
            wrong += [f"{param.name}: {each}" for each in problems]
        else:
            good.append(param)
    if strict:
        refuse(wrong, " this model")
    for message in wrong:
        log.warning("load_state_dict: %s; left out", message)
    if others:
        log.info(
            "load_state_dict: %s: another codec, or none; gradient that the saved one held back is "
            "delivered, its other states start anew", shorten(others),
        )  # fmt: skip
    return good


def load_measured(chooser: Chooser | None, measured: str) -> None:
    """Let a policy go on with a state's measurements, if they are its own."""
    try:
        if measured and (chooser is None or chooser.measurements is None):
            raise StateError("there is no policy here")
        if measured and chooser is not None and chooser.measurements is not None:
            chooser.measurements.load(measured)
    except StateError as error:
        log.info("load_state_dict: measurements of the saved policy are left out: %s", error)
