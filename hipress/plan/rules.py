"""What happens to each parameter: left alone, or which codec, strategy and partitions.

A fixed compressor is applied to everything it suits; "auto" compares several plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from casync import strategies
from casync.rounds import refuse_workers
from casync.topology import Topology
from hipress.errors import ConfigError
from hipress.model import Param
from hipress.options import SMALL, Options
from hipress.plan.codecs import for_shape, strategy_for

if TYPE_CHECKING:
    from casync.codec import Codec

NATIVE = "allreduce"  # how a tensor without codec travels
UNCOMPRESSED = "uncompressed"  # key of the codec by which it does in gossip
HOSTED = " on the host"  # see `hosted`
SLACK = 64  # bytes
CHUNK = 1 << 20  # elements: a bigger tensor is cut, so that encoding overlaps the transfer


@dataclass(frozen=True)
class Decision:
    """What happens to one parameter, and why. Times are predictions in seconds, None if unknown."""

    name: str
    numel: int
    codec: str | None
    strategy: str
    partitions: int
    why: str
    gain: float | None = None  # how much longer a step would take if it were uncompressed
    runner_up: str = ""  # the next best that could happen to it
    margin: float | None = None  # how much longer a step would take with that


@dataclass(frozen=True)
class Plan:
    """A decision per parameter, in the model's order, and the codecs they name."""

    decisions: tuple[Decision, ...]
    topology: Topology
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    why: str = ""
    downs: Mapping[str, str] = field(default_factory=dict)  # by codec: that of owners, if another
    seconds: float = 0.0  # predicted of a step; 0 where nothing was predicted
    fused: bool = False  # whether neighbours in a bucket that have one codec are compressed as one

    @property
    def compresses(self) -> bool:
        """Whether any parameter is compressed; if not, DDP's own all-reduce remains."""
        return any(d.codec is not None for d in self.decisions)

    @property
    def hosted(self) -> bool:
        """Whether a device's gradients are copied to the host."""
        return any(map(hosted, self.codecs))

    @property
    def label(self) -> str:
        """Such as `bf16 (allreduce) and int4_group (ps)`."""
        used = {(d.codec.partition("(")[0], d.strategy) for d in self.decisions if d.codec}
        text = " and ".join(f"{codec} ({way})" for codec, way in sorted(used)) or "no compression"
        return text + ", fused" * self.fused

    def down(self, key: str) -> Codec:
        """What owners encode with where workers encode with codec `key`."""
        return self.codecs[self.downs.get(key, key)]

    def both(self, key: str) -> tuple[Codec, ...]:
        """The codec `key`, and that of owners if it is another."""
        return tuple(self.codecs[each] for each in (key, self.downs.get(key)) if each)

    @property
    def by_name(self) -> dict[str, list[str | int]]:
        """Codec ("": none), strategy, partitions and whether fused (0, 1) of each parameter, as
        states hold them."""
        fused = int(self.fused)
        return {d.name: [d.codec or "", d.strategy, d.partitions, fused] for d in self.decisions}

    def facts(self) -> list[dict[str, Any]]:
        """What all ranks must have in common, as JSON takes it."""
        keys = ("name", "codec", "strategy", "partitions")
        fused = {"fused": self.fused}
        return [{key: getattr(d, key) for key in keys} | fused for d in self.decisions]


def hosted(key: str) -> bool:
    """Whether this is the key of a codec to which a device's gradients are copied."""
    return key.endswith(HOSTED)


def restored(
    saved: Mapping[str, Any],
    params: Sequence[Param],
    codecs: Mapping[str, Codec],
    topology: Topology,
) -> Plan | None:
    """The plan that Plan.by_name told; None where it is none of these parameters and codecs."""
    if saved.keys() != {param.name for param in params}:
        return None
    decisions = []
    fused = any(way[3] for way in saved.values())
    for param in params:
        key, strategy, cut, _ = saved[param.name]
        if key not in ("", *codecs) or strategy not in strategies.list_strategies():
            return None
        why = "as it was when the state was saved"
        decisions.append(Decision(param.name, param.numel, key or None, strategy, cut, why))
    used = {decision.codec for decision in decisions}
    kept = {key: codec for key, codec in codecs.items() if key in used}
    return Plan(tuple(decisions), topology, kept, why, fused=fused)


def fixed_plan(
    params: Sequence[Param],
    codec: Codec,
    options: Options,
    topology: Topology,
    down: Codec | None = None,
) -> Plan:
    """`codec` for every parameter it suits. `down`: what owners encode with, if another."""
    strategy, world_size = strategy_for(codec, options.strategy, down), topology.world_size
    refuse_many(codec, world_size)
    own = {p.shape: own_codec(codec, p, options) for p in params}
    decisions = [
        fixed(p, *own[p.shape], strategy, "asked for", options, world_size) for p in params
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
    """Raise ConfigError for a codec whose payloads do not add up over so many ranks."""
    if refusal := refuse_workers(codec, world_size):
        raise ConfigError(refusal)


def own_codec(codec: Codec, param: Param, options: Options) -> tuple[str, Codec]:
    """What a parameter gets of a codec, and its key; a run of a bucket has no shape."""
    return for_shape(codec, param.shape) if options.scope == "tensor" else (codec.name, codec)


def _none_eligible(codec: Codec, decisions: Sequence[Decision]) -> str:
    """Such as `no tensor is eligible for 'onebit': sparse gradient (2), no elements (1)`."""
    reasons = Counter(d.why for d in decisions).most_common()
    counted = ", ".join(f"{why} ({count})" for why, count in reasons)
    return f"no tensor is eligible for {codec.name!r}: {counted}"


def raw(param: Param, why: str) -> Decision:
    """The decision to leave a parameter uncompressed."""
    return Decision(param.name, param.numel, None, NATIVE, 1, why)


def excluded(param: Param, options: Options) -> str | None:
    """Why no codec may touch this parameter, or None."""
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
    """A pattern that matches nothing is a mistake: raise ConfigError."""
    for pattern in options.exclude:
        if not any(param.matches(pattern) for param in params):
            known = ", ".join(p.name for p in params[:8])
            more = ", ..." if len(params) > 8 else ""
            raise ConfigError(f"exclude pattern {pattern!r} matches no parameter of {known}{more}")


def too_small(param: Param, codec: Codec, options: Options) -> str | None:
    """Why this codec would not help a tensor of this size, or None."""
    if param.numel < minimum(codec, options):
        return f"fewer than {minimum(codec, options)} elements"
    if not codec.suits(param.numel):
        return f"{codec.name} would not pay at this size"
    # A few bytes more are welcome: they spare a second message for the one tiny tensor. Where the
    # length depends on the data, its bound is far above what is sent, and stops tiny tensors only.
    most = 4 * param.numel if codec.fixed else 8 * param.numel
    if codec.payload_bytes(param.numel) > most + SLACK:
        return "the payload would be larger than the gradient"
    return None


def minimum(codec: Codec, options: Options) -> int:
    """Elements below which a tensor stays uncompressed."""
    if options.min_size is not None:
        return options.min_size
    whole = codec.align > 1 or codec.additive is not None or options.scope != "tensor"
    return 0 if whole else SMALL


def partitions(numel: int, codec: Codec, strategy: str, world_size: int) -> int:
    """Partitions for a tensor: chunks of about CHUNK elements.

    A codec without groups is not cut more than it must be: each chunk would have a scale, or a
    selection, of its own. A strategy that spreads over owners cuts into world_size chunks a
    partition anyway.
    """
    if codec.align == 1 and codec.additive is None:
        return 1
    chunks = max(1, math.ceil(numel / CHUNK))
    if strategies.load(strategy).SPREADS in ("", "tensors"):
        return chunks
    return max(1, math.ceil(chunks / world_size))


def fixed(
    param: Param,
    key: str,
    codec: Codec,
    strategy: str,
    why: str,
    options: Options,
    world_size: int,
) -> Decision:
    """This codec for a parameter, if it suits. `key`: that of the codec in the plan."""
    refusal = excluded(param, options) or too_small(param, codec, options)
    if refusal is not None:
        return raw(param, refusal)
    cut = partitions(param.numel, codec, strategy, world_size)
    return Decision(param.name, param.numel, key, strategy, cut, why)
