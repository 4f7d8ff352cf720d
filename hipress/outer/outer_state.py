"""Records of an outer loop."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from hipress.channel.records import (
    OUTER,
    check_place,
    check_record,
    check_states,
    check_undelivered,
    entries_of,
    export_states,
    make_record,
    refuse,
)
from hipress.errors import StateError
from hipress.outer.fragments import Fragment, by_parameter
from hipress.outer.rounds import Round
from hipress.outer.site import Site
from hipress.outer.sites import Sites
from hipress.ranks.groups import Mean

_SHARED = {"agreed", "momentum"}  # in every record's `more`
_OWN = {"course", "steps", "calls", "round"}  # and in that of a site's own


def export(site: Site, *, portable: bool) -> dict[str, Any]:
    """The record of this site, or one for any number of sites: see `hipress.state_dict`."""
    shared = {
        "agreed": by_parameter(site.fragments, lambda f: f.agreed),
        "momentum": by_parameter(site.fragments, lambda f: f.momentum),
    }
    if site.has_left:  # others have taken over what this site had not delivered
        return make_record(OUTER, site.rounds, portable=True, more=shared)
    sites = site.connected()
    if site.round is not None and (portable or sites.changes):
        raise StateError(
            "a round of the outer loop is under way: save where outer.round is None, after the "
            "step in which its delay is over"
        )
    if site.round is not None:
        site.round.wait()  # first: until then its encodes change states
    if portable:
        mean = Mean(sites.coordinator)
        some = mean.where_any(map(site.left, site.fragments))
        behind = [f for f, any_ in zip(site.fragments, some, strict=True) if any_]
        undelivered = by_parameter(behind, lambda f: mean(site.left(f)))
        return make_record(OUTER, site.rounds, portable=True, undelivered=undelivered, more=shared)
    return make_record(
        OUTER,
        site.rounds,
        place=_place(sites),
        **export_states(sites.states),
        undelivered=by_parameter(site.fragments, lambda f: f.undelivered),
        more={
            **shared,
            "course": site.schedule.course,
            "steps": site.steps,
            "calls": sites.calls,
            "round": _round(site.round),
        },
    )


def _place(sites: Sites) -> list[int]:
    return [sites.coordinator.rank, sites.count]


def under_way(site: Site) -> dict[str, Any]:
    """In place of a portable record amid a round: tells whoever loads it that there is none."""
    more = {"under way": site.connected().count}
    return make_record(OUTER, site.rounds, portable=True, more=more)


def restore(site: Site, state: Mapping[str, Any]) -> None:
    """Go on from a state. Raises StateError; ConfigMismatch if sites' states are of different
    rounds."""
    sites = site.connected()
    coordinator = sites.coordinator
    with coordinator.failures_told():
        if site.round is not None:
            raise StateError("a round of the outer loop is under way: load before the first step")
        check_record(state, OUTER)
        _check(site, state)
    rounds, more, undelivered = state["counter"], state["more"], state["undelivered"]
    agreed = more["agreed"]
    digest = hashlib.sha256()
    for name in sorted(agreed):
        digest.update(agreed[name].float().contiguous().numpy().tobytes())
    coordinator.require_equal(
        {"rounds of the state to load": rounds, "agreed weights": digest.hexdigest()[:16]}
    )
    site.rounds, site.steps = rounds, more.get("steps", 0)
    for fragment in site.fragments:
        fragment.agreed.copy_(fragment.join(agreed))
        if fragment.momentum is not None:
            fragment.momentum.copy_(fragment.join(more["momentum"]))
        own = {
            p.name: undelivered.get(p.name, torch.zeros(p.shape, device="cpu"))
            for p in fragment.params
        }
        fragment.undelivered = fragment.join(own) if own.keys() & undelivered.keys() else None
        if state["portable"]:  # the way of the sites since the last round is undelivered
            fragment.write(fragment.target())
    # of a portable record, what codecs held back is undelivered, too: new sites have none of it
    sites.states.restore(state["states"])
    sites.calls = more.get("calls", site.calls_so_far)
    if not state["portable"]:
        site.round = _restored_round(site, sites, more["round"])


def _restored_round(site: Site, sites: Sites, saved: Mapping[str, Any] | None) -> Round | None:
    """A round that was under way, whose average has come; None if there was none."""
    if saved is None:
        return None
    fragment = site.fragments[site.rounds % len(site.fragments)]
    sent = None if saved["sent"] is None else fragment.join(saved["sent"])
    return Round(site.rounds, fragment, sites, site.schedule, fragment.join(saved["average"]), sent)


def _check(site: Site, state: Mapping[str, Any]) -> None:
    """Raise StateError for a record of another outer loop."""
    more = state["more"]
    if "under way" in more:
        raise StateError(
            "this checkpoint was saved while a round of the outer loop was under way: it goes on "
            f"only at {more['under way']} sites as before, by hipress.Stateful(outer, "
            "resume=FOLDER), or load one that was saved between two rounds"
        )
    needed = _SHARED if state["portable"] else _SHARED | _OWN
    if not needed <= more.keys():
        raise StateError(f"damaged state: more: expected {sorted(needed)}, got {sorted(more)}")
    shapes = {p.name: tuple(p.shape) for fragment in site.fragments for p in fragment.params}
    other = {name: tuple(each.shape) for name, each in more["agreed"].items()}
    for name in sorted(shapes.keys() | other.keys()):
        if shapes.get(name) != other.get(name):
            raise StateError(
                f"the state does not fit the model: {name!r} has the shape {other.get(name)} there "
                f"and {shapes.get(name)} here"
            )
    if site.schedule.outer.momentum and not more["momentum"]:
        raise StateError("the state has no outer momentum, and `outer` has")
    wrong = check_undelivered(state, shapes)[1]
    if not state["portable"]:
        sites = site.connected()
        wrong += check_place(state, _place(sites))
        others = dict.fromkeys(shapes, "no compressor with states")
        wrong += check_states(state, entries_of(sites.states), others)[1]
        if more["course"] != site.schedule.course:
            wrong.append(
                f"it is of rounds with {more['course']}, not {site.schedule.course}: use the "
                "options of before, or save with portable=True"
            )
    refuse(wrong)


def _round(under_way: Round | None) -> dict[str, Any] | None:
    if under_way is None:
        return None
    fragment: Fragment = under_way.fragment
    sent = None if under_way.sent is None else fragment.split(under_way.sent.clone())
    return {"average": fragment.split(under_way.values.clone()), "sent": sent}
