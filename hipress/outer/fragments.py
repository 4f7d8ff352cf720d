"""Fragments of a model: parameters that travel in one round, as flat values on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from hipress.choose.plan import Plan
from hipress.errors import ConfigError, SyncError
from hipress.model.params import Param
from hipress.model.shards import local
from hipress.outer.schedule import KEPT, OuterSGD, Schedule


@dataclass(frozen=True)
class Bundle:
    """Neighbours in a fragment that have one codec and strategy, and travel as one tensor."""

    name: str  # the same at all sites
    codec: str | None  # key in the plan; None: uncompressed
    strategy: str
    start: int  # in the fragment
    params: tuple[Param, ...]

    @property
    def part(self) -> slice:
        """Its elements in the fragment."""
        return slice(self.start, self.start + sum(param.numel for param in self.params))


class Fragment:
    """Some parameters with the weights that sites agreed on, and the outer momentum.

    Flat values are float32 on the host, [elements], in the order of the bundles.
    """

    def __init__(
        self,
        number: int,
        pairs: Sequence[tuple[Param, nn.Parameter]],
        plan: Plan,
        schedule: Schedule,
    ) -> None:
        """Begin with the parameters' values. plan: decides for all parameters of the model."""

        def way(pair: tuple[Param, nn.Parameter]) -> tuple[str, str]:
            decision = plan.decisions[pair[0].index]
            return decision.strategy, decision.codec or ""

        ordered = sorted(pairs, key=way)  # stable: within a bundle the model's order
        self.params = [param for param, _ in ordered]
        self._parameters = [parameter for _, parameter in ordered]
        self.bundles: list[Bundle] = []
        start = 0
        for (strategy, codec), members in groupby(ordered, way):
            named = tuple(param for param, _ in members)
            name = f"fragment {number}, {codec or 'uncompressed'} by {strategy}"
            self.bundles.append(Bundle(name, codec or None, strategy, start, named))
            start = self.bundles[-1].part.stop
        self.elements = start
        pinned = any(param.device.type == "cuda" for param in self.params)
        #: in the type of `keep`, and pinned if the model is on a GPU
        self.agreed = torch.empty(start, dtype=KEPT[schedule.keep], pin_memory=pinned, device="cpu")
        self.momentum = torch.zeros(start, device="cpu") if schedule.outer.momentum else None
        #: pseudo-gradient of this site that earlier rounds did not deliver
        self.undelivered: torch.Tensor | None = None
        self.agreed.copy_(self.weights())

    def weights(self) -> torch.Tensor:
        """The parameters' present values, a copy."""
        flat = torch.empty(self.elements, device="cpu")
        for piece, parameter in self._pieces(flat):
            piece.copy_(local(parameter).detach().reshape(-1))
        return flat

    def refuse_infinite(self) -> None:
        """Raise SyncError for a parameter with an infinity or NaN: a round would spread it to the
        agreed weights and momentum of all sites, for good."""
        for param, parameter in zip(self.params, self._parameters, strict=True):
            if not local(parameter).detach().isfinite().all():
                raise SyncError(
                    f"{param.name!r} has an infinity or NaN: training at this site has diverged, "
                    "and it ends before a round spreads that to all. Start it again from a "
                    "checkpoint, with gradients clipped or a lower learning rate"
                )

    def change(self) -> torch.Tensor:
        """The pseudo-gradient: agreed weights, rounded as the parameters are, minus theirs."""
        flat = self.target()
        for piece, parameter in self._pieces(flat):
            piece.sub_(local(parameter).detach().reshape(-1).to("cpu", torch.float32))
        return flat

    def target(self) -> torch.Tensor:
        """Agreed weights, rounded to the parameters' types."""
        flat = self.agreed.float() if self.agreed.dtype != torch.float32 else self.agreed.clone()
        for piece, parameter in self._pieces(flat):
            if parameter.dtype != torch.float32:
                piece.copy_(piece.to(parameter.dtype))
        return flat

    def advance(self, average: torch.Tensor, outer: OuterSGD, seed: int) -> None:
        """Step agreed weights and momentum by a round's average, which is overwritten. seed: of the
        rounding to bfloat16, the same at all sites."""
        if self.agreed.dtype == torch.float32:
            outer.step(self.agreed, average, self.momentum)
            return
        exact = self.agreed.float()
        outer.step(exact, average, self.momentum)
        self.agreed.copy_(_to_bfloat16(exact, seed))

    def move(self, sent: torch.Tensor | None, mix: float | None) -> None:
        """Move the parameters towards the agreed weights.

        mix: the share of the way. None: all of it, and what they changed since they were `sent`
        stays, if these are given.
        """
        goal = self.target()
        if mix is None and sent is not None:
            goal.add_(self.weights()).sub_(sent)
        elif mix is not None and mix < 1:
            goal = torch.lerp(self.weights(), goal, mix)
        self.write(goal)

    def write(self, flat: torch.Tensor) -> None:
        """Overwrite the parameters."""
        with torch.no_grad():
            for piece, parameter in self._pieces(flat):
                own = local(parameter).detach()
                own.copy_(piece.view(own.shape))

    def keep_undelivered(self, values: torch.Tensor, part: slice = slice(None)) -> None:
        """Add values that were not delivered to those of earlier rounds."""
        if self.undelivered is None:
            self.undelivered = torch.zeros(self.elements, device="cpu")
        self.undelivered[part] += values

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Flat values by name of a parameter, in its shape."""
        pieces = torch.split(flat, [param.numel for param in self.params])
        return {p.name: v.view(p.shape) for p, v in zip(self.params, pieces, strict=True)}

    def join(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`: flat float32."""
        return torch.cat([values[param.name].float().reshape(-1) for param in self.params])

    def bytes_by_use(self) -> dict[str, int]:
        """Bytes beyond the weights that last from round to round."""
        tensors = {
            "agreed": self.agreed,
            "momentum": self.momentum,
            "undelivered": self.undelivered,
        }
        return {use: 0 if each is None else each.nbytes for use, each in tensors.items()}

    def _pieces(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, nn.Parameter]]:
        lengths = [param.numel for param in self.params]
        return zip(torch.split(flat, lengths), self._parameters, strict=True)


def by_parameter(
    fragments: Iterable[Fragment], values: Callable[[Fragment], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Copies of flat values of fragments, by name of a parameter; without those that are None."""
    tensors: dict[str, torch.Tensor] = {}
    for fragment in fragments:
        if (flat := values(fragment)) is not None:
            tensors |= {name: each.clone() for name, each in fragment.split(flat).items()}
    return tensors


def cut(
    params: Sequence[Param], parameters: Sequence[nn.Parameter], plan: Plan, schedule: Schedule
) -> list[Fragment]:
    """Fragments of about equal bytes: neighbours in the model's order. Raises ConfigError."""
    count = schedule.fragments
    if count > len(params):
        raise ConfigError(f"fragments={count}, but the model has only {len(params)} parameters")
    total, before = sum(param.numel for param in params), 0
    chosen: list[list[tuple[Param, nn.Parameter]]] = [[] for _ in range(count)]
    number = 0
    for at, pair in enumerate(zip(params, parameters, strict=True)):
        middle = (before + pair[0].numel / 2) * count / max(1, total)
        left = len(params) - at  # each fragment gets one at least
        if chosen[number] and (middle >= number + 1 or left <= count - number - 1):
            number = min(number + 1, count - 1)
        chosen[number].append(pair)
        before += pair[0].numel
    return [Fragment(index, pairs, plan, schedule) for index, pairs in enumerate(chosen)]


def _to_bfloat16(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Round float32 stochastically: nearest values would lose all small steps of agreed weights.
    Finite values stay finite."""
    generator = torch.Generator("cpu").manual_seed(seed)
    bits = values.view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32, device="cpu"
    )
    most = torch.finfo(torch.bfloat16).max
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded.clamp(-most, most), values).bfloat16()
