"""Methods to compare: DDP's own all-reduces, and codecs with the strategies that suit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from casync import strategies
from casync.codec import FLOAT_BYTES, Codec
from casync.predict.timeline import PREDICTED
from casync.topology import Topology
from hipress import options as options_
from hipress.choose import evidence
from hipress.choose.plan import excluded, unsuited
from hipress.choose.search import Way
from hipress.codecs import compile_codec, for_shape, ways_for
from hipress.errors import ConfigError
from hipress.model.params import Param
from hipress.tools.run import methods as texts

__all__ = ["BASELINE", "DEFAULTS", "FP32", "Method", "parse"]

FP32, BASELINE = "fp32", "bf16"
DEFAULTS = (FP32, BASELINE, "int4_group", "onebit_group", "dgc:ratio=0.01", "powersgd:rank=4")


@dataclass(frozen=True)
class Method:
    """A codec with its parameters; without one, DDP's own all-reduce in float32."""

    text: str
    codec: Codec | None = None
    strategy: str = options_.AUTO
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """Its codec by the method's text, to find its costs."""
        return {} if self.codec is None else {self.text: self.codec}

    def ways(self, topology: Topology) -> tuple[str, ...]:
        """Strategies to predict, among those that suit the codec."""
        if self.codec is None:
            return ("allreduce",)
        if self.codec.rounds:
            return ("allreduce",)
        return tuple(
            each for each in ways_for(self.codec, self.strategy, topology) if each in PREDICTED
        )

    def way(self, strategy: str) -> Way | None:
        """The way of suited tensors by this strategy; None without a codec."""
        return None if self.codec is None else Way(self.text, strategy)

    def suits(self, param: Param) -> bool:
        """True if the method compresses this parameter."""
        if self.codec is None or excluded(param, _OPTIONS) is not None:
            return False
        return unsuited(param, self.own(param.shape), _OPTIONS) is None

    def own(self, shape: Sequence[int]) -> Codec:
        """The codec for a parameter of this shape."""
        assert self.codec is not None
        if tuple(shape) not in self._own:
            self._own[tuple(shape)] = for_shape(self.codec, shape)[1]
        return self._own[tuple(shape)]

    @cached_property
    def _own(self) -> dict[tuple[int, ...], Codec]:
        return {}

    def rates(self, params: Sequence[Param]) -> dict[tuple[str, int], float]:
        """Payload bytes per gradient byte, by codec and parameter, of the suited parameters."""
        return {
            (self.text, each.index): self._payload(each) / (FLOAT_BYTES * each.numel)
            for each in params
            if self.suits(each)
        }

    def _payload(self, param: Param) -> int:
        return self.own(param.shape).payload_bytes(param.numel)

    def state_elements(self, params: Sequence[Param]) -> int:
        """Elements of the states that a rank keeps for its own gradients."""
        suited = [each for each in params if self.suits(each)]
        return sum(
            each.numel for each in suited for state in self.own(each.shape).states
            if state.per == "element"
        )  # fmt: skip

    def loss(self, optimizer: str | None) -> str:
        """Measured effect of training with the method on the loss, in the worst case, as text."""
        if self.codec is None:
            return "float32's"
        findings = evidence.of(self.codec, optimizer)
        if not findings:
            return "not measured"
        if all(each.kept for each in findings):
            return "kept"
        worst = evidence.worst(self.codec, optimizer)
        sure = worst is not None
        worst = worst or max(findings, key=lambda each: each.difference or 0.0)
        change = "diverged" if worst.difference is None else f"{worst.difference:+.0%}"
        return f"{change}{'' if sure else ', unsure,'} on {worst.workload}"


_OPTIONS = options_.make("auto")


def parse(text: str) -> Method:
    """Parse fp32, int4_group, dgc:ratio=0.01, int4_group:strategy=ring; or raise ConfigError."""
    if text == FP32:
        return Method(text)
    try:
        method = texts.parse(f"hipress:{text}")
    except ValueError as error:
        compile_codec(text.partition(":")[0], {}, "reference")  # raises for an unknown name
        raise ConfigError(str(error).replace("hipress:", "")) from error
    params = dict(method.options)
    strategy = str(params.pop("strategy", options_.AUTO))
    assert method.codec is not None
    codec = compile_codec(method.codec, params, "reference")
    compared = Method(text, codec, strategy, params)
    if not codec.rounds and not _predicted(compared):
        raise ConfigError(
            f"{text}: no strategy of it is predicted; known are {', '.join(PREDICTED)}"
        )
    if strategy != options_.AUTO and (refusal := strategies.refuses(strategy, codec)):
        raise ConfigError(refusal)
    return compared


def _predicted(method: Method) -> bool:
    return bool(method.ways(Topology.flat(2)))
