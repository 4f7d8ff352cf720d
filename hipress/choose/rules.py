"""Rules by name and shape: codecs for some parameters, whatever the others get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from casync.codec import Codec
from hipress.choose.plan import Decision, Plan, fixed, own_codec, raw, refuse_many
from hipress.codecs import compile_codec, full_name, strategy_for
from hipress.errors import ConfigError
from hipress.errors import shown as shortly
from hipress.model.param_kinds import is_kind, refuse_unknown
from hipress.model.params import Param
from hipress.options import Options

_EXAMPLE = '{"*embed*": "int8_group", "*.bias": None}'


@dataclass(frozen=True)
class Rule:
    """The codec of parameters that a pattern matches and no earlier one does."""

    pattern: str  # of names; with a space, of names and shapes: "*.weight 1000x*"
    codec: Codec | None  # None: uncompressed

    def matches(self, param: Param) -> bool:
        """True if the pattern matches a parameter."""
        return param.matches(self.pattern)

    @property
    def why(self) -> str:
        """Reason of a decision by this rule."""
        return f"rule {self.pattern!r}"

    def __str__(self) -> str:
        return f"{self.pattern}: {None if self.codec is None else full_name(self.codec)}"


def compiled(options: Options, target: str = "cpu") -> tuple[Rule, ...]:
    """Rules of a mapping or a YAML file, with codecs for a backend of compll; or ConfigError."""
    return tuple(_rule(*rule, options, target) for rule in _load(options.rules))


def _load(rules: Any) -> Iterator[tuple[str, Any, str]]:
    """Patterns with what is wanted for them, and their place in a file, or ""."""
    if isinstance(rules, str | os.PathLike):
        from hipress import reading  # not above: see errors.shown

        file = reading.read(Path(rules), "a rules file", f"such as {_EXAMPLE}")
        reading.refuse(file.problems)
        for pattern in file.names():
            place = f"{file.problems.path}:{file.at(pattern).line}:{file.at(pattern).col}: "
            yield pattern, reading.plain(file.value(pattern)), place
        return
    if not isinstance(rules, Mapping) or not all(isinstance(key, str) for key in rules):
        raise ConfigError(
            f"rules are patterns of names with compressors, such as {_EXAMPLE}, or a YAML file of "
            f"such, not {shortly(rules)}"
        )
    for pattern, wanted in rules.items():
        yield pattern, wanted, ""


def _rule(pattern: str, wanted: Any, place: str, options: Options, target: str) -> Rule:
    try:
        codec = codec_of(wanted, target)
        if codec is not None:
            strategy_for(codec, options.strategy)
    except ConfigError as error:
        raise ConfigError(f"{place}rule {pattern!r}: {error}") from error
    return Rule(pattern, codec)


def codec_of(wanted: Any, target: str) -> Codec | None:
    """The codec of a rule's value: a codec, a name or path, a mapping with parameters, or None."""
    if wanted is None or callable(getattr(wanted, "encode_batch", None)):
        codec: Codec | None = wanted
        return codec
    name, params = wanted, {}
    if isinstance(wanted, Mapping):
        params = dict(wanted)
        name = params.pop("compressor", None)
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if not isinstance(name, str):
        raise ConfigError(
            "a rule has a compressor's name or path, None, or a mapping such as "
            f'{{"compressor": "topk", "ratio": 0.1}}, not {shortly(wanted)}'
        )
    return compile_codec(name, params, target)


def for_json(rules: Any) -> Any:
    """Rules as values for JSON: a path, or compressors by pattern."""
    if not isinstance(rules, Mapping):
        return os.fspath(rules)
    return {pattern: _for_json(wanted) for pattern, wanted in rules.items()}


def _for_json(wanted: Any) -> Any:
    if callable(getattr(wanted, "encode_batch", None)):
        return full_name(wanted)
    return dict(wanted) if isinstance(wanted, Mapping) else wanted and os.fspath(wanted)


@dataclass(frozen=True)
class Overrides:
    """Decisions of rules, by index of the parameter in the model."""

    decisions: Mapping[int, Decision]
    codecs: Mapping[str, Codec]  # by their keys in a plan

    def apply(self, plan: Plan) -> Plan:
        """The plan with the rules' decisions in place of its own."""
        decisions = [self.decisions.get(i, d) for i, d in enumerate(plan.decisions)]
        used = {d.codec for d in decisions}
        used |= {down for key, down in plan.downs.items() if key in used}
        codecs = {key: codec for key, codec in plan.codecs.items() if key in used}
        downs = {key: down for key, down in plan.downs.items() if key in used}
        return replace(
            plan, decisions=tuple(decisions), codecs={**codecs, **self.codecs}, downs=downs
        )


NO_RULES = Overrides({}, {})


def decide(
    rules: Sequence[Rule],
    params: Sequence[Param],
    codecs: Sequence[Codec],
    options: Options,
    world_size: int,
) -> Overrides:
    """Decisions of the rules. codecs: those of other parameters, whose keys must differ. Raises
    ConfigError for a rule that gets no parameter."""
    others = {codec.name: codec.digest for codec in codecs}
    decisions: dict[int, Decision] = {}
    used: dict[str, Codec] = {}
    for index, rule in sorted(assign(rules, params).items()):
        if rule.codec is None:
            decisions[index] = raw(params[index], rule.why)
            continue
        refuse_many(rule.codec, world_size)
        key, codec = own_codec(rule.codec, params[index], options)
        if others.setdefault(codec.name, codec.digest) != codec.digest:
            key = full_name(codec)
        way = strategy_for(codec, options.strategy)
        decision = fixed(params[index], key, codec, way, rule.why, options, world_size)
        decisions[index] = decision
        if decision.codec is not None:
            used[key] = codec
    return Overrides(decisions, used)


def assign(rules: Sequence[Rule], params: Sequence[Param]) -> dict[int, Rule]:
    """The first matching rule by index of a parameter; ConfigError for a rule that gets none. A
    model may lack a kind."""
    rule_of: dict[int, Rule] = {}
    for rule in rules:
        refuse_unknown(rule.pattern)
        matched = [param for param in params if rule.matches(param)]
        mine = [param.index for param in matched if param.index not in rule_of]
        if not mine and not is_kind(rule.pattern):
            raise ConfigError(_useless(rule, [rule_of[p.index] for p in matched], params))
        rule_of.update(dict.fromkeys(mine, rule))
    return rule_of


def _useless(rule: Rule, earlier: Sequence[Rule], params: Sequence[Param]) -> str:
    if earlier:
        return (
            f"rule {rule.pattern!r} gets no parameter: rule {earlier[0].pattern!r} before it "
            "matches the same; the first that matches counts"
        )
    names = [param.named_shape if " " in rule.pattern else param.name for param in params]
    more = ", ..." if len(names) > 8 else ""
    return f"rule {rule.pattern!r} matches no parameter of {', '.join(names[:8])}{more}"
