"""From a plan for gradients to a plan for parameters, which travel to neighbours only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from casync.codec import Codec
from casync.estimates import Estimate
from casync.memory.host import HostMemory
from casync.raw import Raw
from hipress.choose.plan import UNCOMPRESSED, Plan
from hipress.codecs import full_name, partitions, state_of
from hipress.errors import ConfigError
from hipress.policies import roundtrip

_SCALES = (1.0, 1e-4)  # scales of the differences that test a codec
_TRIED = 1 << 16  # elements


def gossip_plan(
    plan: Plan, links: str, neighbours: Sequence[int], rounds: str = "", more: Sequence[str] = ()
) -> Plan:
    """A plan with every parameter by gossip; parameters that are not to be compressed travel raw.

    links: as in casync.strategies.gossip; neighbours: of this rank; rounds: text on local steps;
    more: further states of Estimate. Raises ConfigError for an unsuited codec.
    """
    for codec in plan.codecs.values():
        _refuse(codec)
    codecs = {**plan.codecs, UNCOMPRESSED: Raw()}
    strategy, size = f"gossip:{links}", plan.topology.world_size
    decisions = []
    for decision in plan.decisions:
        key = decision.codec or UNCOMPRESSED
        cut = partitions(decision.numel, codecs[key], strategy, size)
        decisions.append(replace(decision, codec=key, strategy=strategy, partitions=cut))
    used = {decision.codec for decision in decisions}
    off = sorted(codec.name for codec in plan.codecs.values() if codec.states)
    instead = f", which take the place of {' and '.join(off)}'s own error feedback" * bool(off)
    why = (
        f"{plan.why}; gossip ({links}): each rank averages its parameters with estimates of its "
        f"neighbours'{instead}{rounds}. Ranks differ by design"
    )
    estimates = {
        key: Estimate(each, neighbours, more) for key, each in codecs.items() if key in used
    }
    return Plan(tuple(decisions), plan.topology, estimates, why)


def step_sizes(plan: Plan, gamma: float | None) -> dict[str, float]:
    """Step sizes by codec: the share of the way to its neighbours' average that a parameter moves;
    gamma, or half of the share of normal noise that the codec keeps, to two digits."""
    return {
        key: float(f"{_share_sent(codec) / 2:.2g}") if gamma is None else gamma
        for key, codec in plan.codecs.items()
    }


def _refuse(codec: Codec) -> None:
    """Raise ConfigError for a codec whose payloads do not improve an estimate."""
    others = [state.name for state in codec.states if state.fate != "owed"]
    why = ""
    if codec.rounds or codec.vote:
        why = "its payloads mean something only together with those of all ranks"
    elif others:
        why = f"it keeps a state of gradients ({', '.join(sorted(others))})"
    elif (share := _share_sent(codec)) <= 0:
        why = (
            f"the square of its error is {1 - share:.3g} times that of its input, so estimates of "
            "parameters would not improve"
        )
    if why:
        raise ConfigError(
            f"compressor {full_name(codec)} cannot serve gossip: {why}; use one such as "
            "int4_group, topk or natural"
        )


def _share_sent(codec: Codec) -> float:
    """Share of the square of normal noise that one payload keeps; the least of some scales."""
    noise = np.random.default_rng(0).standard_normal(_TRIED).astype(np.float32)
    shares = []
    for scale in _SCALES:
        values = torch.from_numpy(noise * np.float32(scale))
        state = state_of(codec, HostMemory(), _TRIED) if isinstance(codec, Estimate) else None
        error = values - roundtrip(codec, values, state)
        shares.append(1 - float(error.square().sum() / values.square().sum()))
    return min(shares)
