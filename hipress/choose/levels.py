"""Plans for the levels of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from casync.codec import Codec
from casync.topology import Topology
from hipress.choose.plan import Plan, fixed_plan
from hipress.choose.rules import Overrides
from hipress.codecs import compile_codec, full_name, strategy_for
from hipress.errors import ConfigError
from hipress.model.params import Param
from hipress.options import Options
from hipress.policies import Policy

ELEMENTS = 1 << 20  # of a tensor by which levels are compared


def compiled(policy: Policy, options: Options, target: str = "cpu") -> dict[str, Codec]:
    """The compressor at each level, by description, for a backend of compll; or ConfigError."""
    codecs = dict[str, Codec]()
    for params in policy.levels:
        try:
            codec = compile_codec(policy.compressor, params, target)
            strategy_for(codec, options.strategy)
        except ConfigError as error:
            raise ConfigError(f"policy {type(policy).__name__}: {error}") from error
        codecs[full_name(codec)] = codec
    if len(codecs) < len(policy.levels):
        name = type(policy).__name__
        raise ConfigError(f"policy {name}: two of its levels are the same: {', '.join(codecs)}")
    for (before, less), (after, more) in pairwise(codecs.items()):
        if less.payload_bytes(ELEMENTS) < more.payload_bytes(ELEMENTS):
            raise ConfigError(
                f"policy {type(policy).__name__}: levels go from the least compressed on, and "
                f"{before}, which compresses more, comes before {after}: turn them round"
            )
    return codecs


def plans(
    policy: Policy,
    codecs: Sequence[Codec],
    params: Sequence[Param],
    options: Options,
    topology: Topology,
    overrides: Overrides,
) -> list[Plan]:
    """A plan for each level."""
    by_level = []
    for number, codec in enumerate(codecs):
        plan = _rename(fixed_plan(params, codec, options, topology), f"level {number}")
        by_level.append(overrides.apply(replace(plan, why=f"by {policy}")))
    return by_level


def _rename(plan: Plan, suffix: str) -> Plan:
    """The plan with a suffix on its keys: the codecs of all levels have the same name."""
    decisions = [
        replace(d, codec=None if d.codec is None else f"{d.codec} {suffix}") for d in plan.decisions
    ]
    codecs = {f"{key} {suffix}": codec for key, codec in plan.codecs.items()}
    return replace(plan, decisions=tuple(decisions), codecs=codecs)
