"""States of an outer loop, as plain tensors and numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hipress.errors import StateError
from hipress.outer.fragments import Fragment, by_parameter
from hipress.outer.rounds import Round
from hipress.outer.sites import Sites
from hipress.ranks.link import Mean

if TYPE_CHECKING:
    from hipress.outer.outer import Outer

FORMAT = 1
_SHARED = {"rounds", "agreed", "momentum", "owed", "portable"}  # of every state
_OWN = {
    "site",
    "sites",
    "course",
    "steps",
    "calls",
    "codecs",
    "state",
    "round",
}  # and of a site's own


def export(outer: Outer, *, portable: bool) -> dict[str, Any]:
    """The state of this site, or one for any number of sites: see `hipress.state_dict`."""
    common = {
        "format": FORMAT,
        "outer": True,
        "rounds": outer.rounds,
        "agreed": by_parameter(outer.fragments, lambda f: f.agreed),
        "momentum": by_parameter(outer.fragments, lambda f: f.momentum),
    }
    if outer.has_left:  # others have taken over what this site had not delivered
        return common | {"portable": True, "owed": {}}
    sites = outer.connected()
    if outer.round is not None and (portable or sites.changes):
        raise StateError(
            "a round of the outer loop is under way: save where outer.round is None, after the "
            "step in which its delay is over"
        )
    if outer.round is not None:
        outer.round.wait()  # first: until then its encodes change states
    if portable:
        mean = Mean(sites.coordinator)
        some = mean.where_any(map(outer.left, outer.fragments))
        owing = [f for f, owes in zip(outer.fragments, some, strict=True) if owes]
        owed = by_parameter(owing, lambda f: mean(outer.left(f)))
        return common | {"portable": True, "owed": owed}
    return common | {
        "portable": False,
        "site": sites.coordinator.rank,
        "sites": sites.count,
        "course": outer.schedule.course,
        "steps": outer.steps,
        "calls": sites.calls,
        "owed": by_parameter(outer.fragments, lambda f: f.owed),
        **sites.states.export(),
        "round": _round(outer.round),
    }


def under_way(outer: Outer) -> dict[str, Any]:
    """In place of a portable state amid a round: tells whoever loads it that there is none."""
    return {"format": FORMAT, "outer": True, "under way": outer.connected().count}


def restore(outer: Outer, state: Mapping[str, Any]) -> None:
    """Go on from a state. Raises StateError; ConfigMismatch if sites' states are of different
    rounds."""
    sites = outer.connected()
    coordinator = sites.coordinator
    with coordinator.failures_told():
        if outer.round is not None:
            raise StateError("a round of the outer loop is under way: load before the first step")
        _check(outer, state)
    digest = hashlib.sha256()
    for name in sorted(state["agreed"]):
        digest.update(state["agreed"][name].float().contiguous().numpy().tobytes())
    coordinator.require_equal(
        {"rounds of the state to load": state["rounds"], "agreed weights": digest.hexdigest()[:16]}
    )
    outer.rounds, outer.steps = state["rounds"], state.get("steps", 0)
    for fragment in outer.fragments:
        fragment.agreed.copy_(fragment.join(state["agreed"]))
        if fragment.momentum is not None:
            fragment.momentum.copy_(fragment.join(state["momentum"]))
        owed = {p.name: state["owed"].get(p.name, torch.zeros(p.shape)) for p in fragment.params}
        fragment.owed = fragment.join(owed) if owed.keys() & state["owed"].keys() else None
        if state["portable"]:  # the way of the sites since the last round is owed
            fragment.write(fragment.target())
    if state["portable"]:  # and so is what codecs held back: new sites have none of it
        sites.calls = outer.calls_so_far
        sites.states.clear()
    else:
        sites.calls = state["calls"]
        sites.states.restore(state)
        outer.round = _restored_round(outer, sites, state["round"])


def _restored_round(outer: Outer, sites: Sites, saved: Mapping[str, Any] | None) -> Round | None:
    """A round that was under way, whose average has come; None if there was none."""
    if saved is None:
        return None
    fragment = outer.fragments[outer.rounds % len(outer.fragments)]
    sent = None if saved["sent"] is None else fragment.join(saved["sent"])
    return Round(fragment, sites, outer.schedule, fragment.join(saved["average"]), sent)


def _check(outer: Outer, state: Any) -> None:
    """Raise StateError for a state of something else."""
    if isinstance(state, Mapping) and "under way" in state:
        raise StateError(
            "this checkpoint was saved while a round of the outer loop was under way: it goes on "
            f"only at {state['under way']} sites as before, by hipress.Stateful(outer, "
            "resume=FOLDER), or load one that was saved between two rounds"
        )
    keys = state.keys() if isinstance(state, Mapping) and state.get("outer") else set()
    needed = _SHARED if keys and state.get("portable") else _SHARED | _OWN
    if not needed <= keys or state["format"] != FORMAT:
        raise StateError("this is no state of a hipress.Outer, or one of another version")
    wanted = {p.name: p.shape for fragment in outer.fragments for p in fragment.params}
    other = {name: tuple(each.shape) for name, each in state["agreed"].items()}
    for name in sorted(wanted.keys() | other.keys()):
        if wanted.get(name) != other.get(name):
            raise StateError(
                f"the state does not fit the model: {name!r} has the shape {other.get(name)} there "
                f"and {wanted.get(name)} here"
            )
    if outer.schedule.outer.momentum and not state["momentum"]:
        raise StateError("the state has no outer momentum, and `outer` has")
    if state["portable"]:
        return
    sites = outer.connected()
    here, there = (sites.coordinator.rank, sites.count), (state["site"], state["sites"])
    if here != there:
        raise StateError(
            f"the state is that of site {there[0]} of {there[1]}, and this is site {here[0]} of "
            f"{here[1]}: save with portable=True to go on with other sites"
        )
    if state["course"] != outer.schedule.course:
        raise StateError(
            f"the state is of rounds with {state['course']}, not {outer.schedule.course}: use the "
            "options of before, or save with portable=True"
        )
    sites.states.check(state)


def _round(under_way: Round | None) -> dict[str, Any] | None:
    if under_way is None:
        return None
    fragment: Fragment = under_way.fragment
    sent = None if under_way.sent is None else fragment.split(under_way.sent.clone())
    return {"average": fragment.split(under_way.values.clone()), "sent": sent}
