"""Decisions for parameters: uncompressed, or a codec with strategy and partitions.

A fixed compressor is used for all parameters that it suits; "auto" compares several plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from casync import strategies
from casync.codec import Codec
from casync.graph.shares import LEAST_BYTES
from casync.rounds import refuse_workers
from casync.topology import Topology
from hipress.codecs import NATIVE, for_shape, partitions, strategy_for
from hipress.errors import ConfigError
from hipress.model.param_kinds import is_kind, refuse_unknown
from hipress.model.params import Param
from hipress.options import SMALL, Options

UNCOMPRESSED = "uncompressed"  # key of the raw codec in gossip
HOSTED = " on the host"  # see `hosted`
SLACK = 64  # bytes


@dataclass(frozen=True)
class Decision:
    """The decision for one parameter, with its reason."""

    name: str
    numel: int
    codec: str | None
    strategy: str
    partitions: int
    why: str


@dataclass(frozen=True)
class Plan:
    """A decision per parameter, in the model's order, and the codecs they name."""

    decisions: tuple[Decision, ...]
    topology: Topology
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    why: str = ""
    downs: Mapping[str, str] = field(default_factory=dict)  # codec of owners, if another, by codec
    seconds: float = 0.0  # predicted for a step; 0 without a prediction
    least: int = LEAST_BYTES  # bytes of gradient in an owner's share of the model: see messages.py
    captured: bool = False  # True if buckets are launched as CUDA graphs: see tuner.py

    @property
    def compresses(self) -> bool:
        """True if any parameter is compressed; otherwise DDP's own all-reduce remains."""
        return any(d.codec is not None for d in self.decisions)

    @property
    def hosted(self) -> bool:
        """True if a device's gradients are copied to the host."""
        return any(map(hosted, self.codecs))

    @property
    def label(self) -> str:
        """Text such as `bf16 (allreduce) and int4_group (ps)`."""
        used = {(d.codec.partition("(")[0], d.strategy) for d in self.decisions if d.codec}
        text = " and ".join(f"{codec} ({way})" for codec, way in sorted(used)) or "no compression"
        return text + ", captured" * self.captured

    def down(self, key: str) -> Codec:
        """Codec of owners for parameters whose workers use codec `key`."""
        return self.codecs[self.downs.get(key, key)]

    def both(self, key: str) -> tuple[Codec, ...]:
        """The codec `key`, and the codec of owners if it is another."""
        return tuple(self.codecs[each] for each in (key, self.downs.get(key)) if each)

    @property
    def by_name(self) -> dict[str, list[str | int]]:
        """Codec ("": none), strategy, partitions, and `least` if measured, by parameter, for
        states."""
        common = [self.least] if self.least != LEAST_BYTES else []
        return {d.name: [d.codec or "", d.strategy, d.partitions, *common] for d in self.decisions}

    def owned_as(self, before: Plan) -> Plan:
        """The same with the shares of a plan that compresses, so that owners' residuals stay."""
        return replace(self, least=before.least) if before.compresses else self

    def facts(self) -> list[dict[str, Any]]:
        """Values in which all ranks must agree, for JSON."""
        keys = ("name", "codec", "strategy", "partitions")
        common = {"least": self.least, "captured": self.captured}
        return [{key: getattr(d, key) for key in keys} | common for d in self.decisions]


def hosted(key: str) -> bool:
    """True if the key is that of a codec on the host, for gradients of a device."""
    return key.endswith(HOSTED)


def restored(
    saved: Mapping[str, Any],
    params: Sequence[Param],
    codecs: Mapping[str, Codec],
    topology: Topology,
) -> Plan | None:
    """The plan of a Plan.by_name; None if it does not fit these parameters and codecs."""
    if saved.keys() != {param.name for param in params}:
        return None
    decisions = []
    least = max((way[3] for way in saved.values() if len(way) > 3), default=LEAST_BYTES)
    for param in params:
        key, strategy, cut, *_ = saved[param.name]
        strategy = strategies.current_name(strategy)
        if key not in ("", *codecs) or strategy not in strategies.list_strategies():
            return None
        why = "as it was when the state was saved"
        decisions.append(Decision(param.name, param.numel, key or None, strategy, cut, why))
    used = {decision.codec for decision in decisions}
    used_codecs = {key: codec for key, codec in codecs.items() if key in used}
    return Plan(tuple(decisions), topology, used_codecs, why, least=least)


def fixed_plan(
    params: Sequence[Param],
    codec: Codec,
    options: Options,
    topology: Topology,
    down: Codec | None = None,
) -> Plan:
    """A plan with `codec` for every parameter that it suits. down: codec of owners, if another."""
    strategy, world_size = strategy_for(codec, options.strategy, down), topology.world_size
    refuse_many(codec, world_size)
    own = {p.shape: own_codec(codec, p, options) for p in params}
    total = sum(p.numel for p in params)
    decisions = [
        fixed(p, *own[p.shape], strategy, "asked for", options, world_size, total) for p in params
    ]
    used = {d.codec for d in decisions}
    codecs = {key: each for key, each in own.values() if key in used}
    if not codecs:
        return Plan(tuple(decisions), topology, {}, _none_eligible(codec, decisions))
    why = f"compressor {codec.name!r} was asked for"
    if down is None:
        return Plan(tuple(decisions), topology, codecs, why)
    key = down.name if down.name not in codecs else f"{down.name} down"
    downs = dict.fromkeys(codecs, key)
    why += f", and {down.name!r} down"
    return Plan(tuple(decisions), topology, {**codecs, key: down}, why, downs)


def refuse_many(codec: Codec, world_size: int) -> None:
    """Raise ConfigError for a codec whose payloads do not add up over this many ranks."""
    if refusal := refuse_workers(codec, world_size):
        raise ConfigError(refusal)


def own_codec(codec: Codec, param: Param, options: Options) -> tuple[str, Codec]:
    """The key and codec of a parameter, by its shape; without shape for a run of a bucket."""
    return for_shape(codec, param.shape) if options.scope == "tensor" else (codec.name, codec)


def _none_eligible(codec: Codec, decisions: Sequence[Decision]) -> str:
    """Text such as `no tensor is eligible for 'onebit': sparse gradient (2), no elements (1)`."""
    reasons = Counter(d.why for d in decisions).most_common()
    counted = ", ".join(f"{why} ({count})" for why, count in reasons)
    return f"no tensor is eligible for {codec.name!r}: {counted}"


def raw(param: Param, why: str) -> Decision:
    """The decision to leave a parameter uncompressed."""
    return Decision(param.name, param.numel, None, NATIVE, 1, why)


def excluded(param: Param, options: Options) -> str | None:
    """The reason why no codec may compress this parameter, or None."""
    if param.numel == 0:
        return "no elements"
    if param.sparse:
        return "sparse gradient"
    if not param.compressible:
        return f"type {str(param.dtype).removeprefix('torch.')} is not compressed"
    for pattern in options.exclude:
        if param.matches(pattern):
            return f"excluded by {pattern!r}"
    return None


def check_patterns(params: Sequence[Param], options: Options) -> None:
    """Raise ConfigError for a pattern that matches no parameter."""
    for pattern in options.exclude:
        refuse_unknown(pattern)
        if not is_kind(pattern) and not any(param.matches(pattern) for param in params):
            known = ", ".join(p.name for p in params[:8])
            more = ", ..." if len(params) > 8 else ""
            raise ConfigError(f"exclude pattern {pattern!r} matches no parameter of {known}{more}")


def unsuited(param: Param, codec: Codec, options: Options) -> str | None:
    """The reason why this codec would not help a tensor of this size or type, or None."""
    if codec.difference is not None and param.dtype != torch.float32:
        return f"references of {codec.name} follow float32 gradients only"
    if param.numel < minimum(codec, options):
        return f"fewer than {minimum(codec, options)} elements"
    if not codec.suits(param.numel):
        return f"{codec.name} would not pay at this size"
    # A few more bytes are accepted: they spare a second message for a tiny tensor. If the length
    # depends on the data, its bound is far above the real length, and excludes only tiny tensors.
    most = 4 * param.numel if codec.fixed else 8 * param.numel
    if codec.payload_bytes(param.numel) > most + SLACK:
        return "the payload would be larger than the gradient"
    return None


def too_large(param: Param, codec: Codec, options: Options, total: int = 0) -> str | None:
    """The reason why a GPU's kernels would need too much memory for this tensor, or None. total:
    elements of all tensors, which scope "model" compresses as one."""
    needed = getattr(codec, "scratch_bytes", None)  # no GPU takes Python objects
    elements = total if options.scope == "model" else param.numel
    size = 0 if needed is None else needed(elements)
    if size <= options.scratch:
        return None
    return f"{codec.name} needs {size >> 20} MiB of scratch memory, over {options.scratch >> 20}"


def minimum(codec: Codec, options: Options) -> int:
    """Least number of elements of a compressed tensor."""
    if options.min_size is not None:
        return options.min_size
    whole = codec.align > 1 or codec.additive is not None or options.scope != "tensor"
    return 0 if whole else SMALL


def fixed(
    param: Param,
    key: str,
    codec: Codec,
    strategy: str,
    why: str,
    options: Options,
    world_size: int,
    total: int = 0,
) -> Decision:
    """The decision for this codec, if it suits the parameter. key: of the codec in the plan."""
    refusal = excluded(param, options) or unsuited(param, codec, options)
    refusal = refusal or too_large(param, codec, options, total)
    if refusal is not None:
        return raw(param, refusal)
    cut = partitions(param.numel, codec, strategy, world_size)
    return Decision(param.name, param.numel, key, strategy, cut, why)
