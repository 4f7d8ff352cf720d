"""Methods of synchronizing gradients: PyTorch's own, and every HiPress codec.

A method is written NAME, hipress:CODEC (`hipress.wrap`), sync:CODEC (`hipress.Synchronizer`, no
DDP), momentum:CODEC (`hipress.wrap` with an optimizer of `hipress.optim`), shard:CODEC (FSDP2 by
`hipress.shard`: the reduce-scatter), hsdp:CODEC (FSDP2 within a host, the codec between hosts) or
outer:CODEC (`hipress.Outer`), with options behind it: hipress:dgc:ratio=0.01:strategy=ring,
shard:int4_group:bf16=true, outer:int4_group:every=20:delay=10. A codec is a name, or a spec's path.
"""

import difflib
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

BASELINES = {
    "none": "no communication",
    "ddp-noop": "DDP, nothing sent",
    "ddp-fp32": "DDP fp32",
    "ddp-fp16": "DDP fp16 hook",
    "ddp-bf16": "DDP bf16 hook",
    "powersgd": "DDP PowerSGD rank 4",
    "powersgd-fp16": "DDP PowerSGD rank 4 in its fp16 wrapper",
    "fsdp2": "FSDP2",
    "fsdp2-bf16": "FSDP2 in bf16",
    "hsdp": "HSDP",
    "hsdp-bf16": "HSDP, reduced in bf16",
}
#: baselines whose payloads are those of rings: gloo's own algorithms send more
BY_FORMULA = ("fsdp2", "fsdp2-bf16", "hsdp", "hsdp-bf16")
#: baselines whose ranks train separately, so that losses and equality mean nothing
ALONE = ("none", "ddp-noop")
#: ways to use a codec, and their names in tables
MOMENTUM, OUTER, SHARD, HSDP = "momentum", "outer", "shard", "hsdp"
WAYS = {
    "hipress": "HiPress",
    "sync": "HiPress, no DDP,",
    MOMENTUM: "HiPress, momentum by",
    OUTER: "HiPress, weights by",
    SHARD: "HiPress, FSDP2 by",
    HSDP: "HiPress, HSDP by",
}
#: an option of MOMENTUM: the steps after which Adam's second moments are frozen, or "auto"
FREEZE = "freeze"
#: options of OUTER: those of hipress.Outer, and of its OuterSGD
SGD = ("lr", "momentum")
ROUNDS = ("every", "fragments", "delay", "mix", "clip", "keep", *SGD)
#: options of SHARD and HSDP: computation in bfloat16, and further ones of hipress.shard
BF16 = "bf16"
SHARDS = (BF16, "all_gather", "in_flight")
AUTO = "auto"
DEFAULTS = (
    *("none", "ddp-fp32", "ddp-fp16", "powersgd"),
    *("hipress:onebit_group", "hipress:int4_group"),
)


@dataclass(frozen=True)
class Method:
    """A parsed method: `codec` is None for a baseline."""

    text: str
    codec: str | None = None
    way: str = ""  # a key of WAYS, with a codec
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in tables and charts."""
        if self.codec is None:
            return BASELINES[self.text]
        options = (f"{k}={v}" for k, v in self.options.items())
        return " ".join([WAYS[self.way], Path(self.codec).name, *options])


def is_ours(text: str) -> bool:
    """True for a method of HiPress."""
    return ":" in text


def period(text: str) -> int:
    """Steps after which the costs of a step repeat, of a method."""
    way, *options = text.split(":")
    every = (option.removeprefix("every=") for option in options if option.startswith("every="))
    return int(next(every, "100")) if way == OUTER else 1


def by_round(text: str, seconds: list[float]) -> list[float]:
    """Seconds of steps; of an outer loop the means from round to round, since a median of steps
    would leave rounds out."""
    every = period(text)
    if every == 1:
        return seconds
    starts = range(0, max(1, len(seconds) - every + 1), every)
    return [statistics.fmean(seconds[at : at + every]) for at in starts if seconds[at:]]


def parse(text: str) -> Method:
    """The method that `text` names; ValueError with the valid names otherwise."""
    name, _, rest = text.strip().partition(":")
    if name in BASELINES and not rest:
        return Method(name)
    codec, *options = rest.split(":")
    if name not in WAYS or not (codec in codecs() or _is_path(codec)):
        raise ValueError(f"unknown method {text!r}; {_nearest(name, codec)}")
    return Method(text.strip(), codec, name, dict(_option(text, option) for option in options))


def parse_all(text: str) -> list[Method]:
    """The methods of a comma-separated list; ValueError if it is empty or repeats a method."""
    methods = [parse(part) for part in text.split(",") if part.strip()]
    names = [method.text for method in methods]
    if not methods or len(set(names)) < len(names):
        raise ValueError(f"methods {text!r}: expected different methods, separated by commas")
    return methods


def check(methods: Iterable[Method], optimizer: str = "adamw") -> None:
    """Raise ValueError for the first method that `hipress.wrap`, `shard` or `Outer` would refuse,
    by its options, or the workload's optimizer, "sgd" or "adamw"."""
    for method in methods:
        if method.way == MOMENTUM and optimizer == "sgd":  # whose momentum is 0
            raise ValueError(
                f"method {method.text!r} averages momentum, and the workload's sgd has none: use "
                "--optimizer adamw"
            )
        named = method.way in (OUTER, SHARD, HSDP)
        if method.codec is not None and (method.options or named or _is_path(method.codec)):
            try:
                if named and method.codec == AUTO:
                    raise ValueError(f'{method.way} needs a compressor by name, not "auto"')
                if method.way == OUTER:
                    outer_options(method)
                _compile(method)
            except ValueError as error:
                message = re.sub(r"\s*\n\s*hint: ", "; ", str(error))
                raise ValueError(f"method {method.text!r}: {message}") from error


def wrapped(method: Method) -> dict[str, Any]:
    """Options for `hipress.wrap` or the codec."""
    own = {MOMENTUM: (FREEZE,), OUTER: ROUNDS, SHARD: SHARDS, HSDP: (BF16,)}.get(method.way, ())
    return {key: value for key, value in method.options.items() if key not in own}


def outer_options(method: Method) -> dict[str, Any]:
    """Options for `hipress.Outer` besides those. Raises ValueError."""
    from hipress.outer.schedule import OuterSGD, Schedule  # not above: it imports torch

    options = {name: value for name, value in method.options.items() if name in ROUNDS}
    outer = OuterSGD(**{name: options.pop(name) for name in SGD if name in options})
    Schedule(**options, outer=outer)
    return {**options, "outer": outer}


def _compile(method: Method) -> None:
    """Check a method's options by the reference backend, which compiles nothing."""
    from hipress import (
        codecs,
        options,  # not above: both import torch
    )

    known = {each.name for each in fields(options.Options)} - {"compressor", "params"}
    chosen = {key: value for key, value in wrapped(method).items() if key in known}
    params = {key: value for key, value in wrapped(method).items() if key not in known}
    chosen_options = options.make(method.codec or AUTO, **chosen, params=params)
    if not chosen_options.automatic:
        compiled = codecs.compile_codec(str(method.codec), params, target="reference")
        if method.way == SHARD and compiled.states:
            raise ValueError(
                "reduce_scatter takes compressors without states, such as int4_group: a residual "
                "would be as large as the unsharded gradients"
            )
        down = codecs.resolve_down(chosen_options, compiled, target="reference")
        codecs.strategy_for(compiled, chosen_options.strategy, down)


def _nearest(name: str, codec: str) -> str:
    way = name if name in WAYS else "hipress"
    ways = {each: f"{way}:{each}" for each in codecs()}
    if name not in WAYS:
        ways |= {each: each for each in BASELINES}
    near = difflib.get_close_matches(codec or name, ways, 1)
    if near:
        return f"did you mean {ways[near[0]]}?"
    baselines = ", ".join(BASELINES)
    kinds = ", ".join(f"{each}:CODEC" for each in WAYS)
    return f"choose from {baselines}, and {kinds}, with a CODEC of `compll list`"


def codecs() -> list[str]:
    """The codecs of this installation, and `auto`."""
    import compll

    return [AUTO, *compll.list_specs()]


def _is_path(codec: str) -> bool:
    from compll.runtime import library

    return library.is_path(codec)


def _option(text: str, option: str) -> tuple[str, Any]:
    key, equals, value = option.partition("=")
    if not (key.isidentifier() and equals and value):
        raise ValueError(f"method {text!r}: expected option=value, found {option!r}")
    return key, _value(value)


def _value(text: str) -> bool | int | float | str:
    for kind in (int, float):  # yaml reads 1e-3 as text
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
