"""Adam and AdamW with a freeze of second moments: ranks then average the first moments.

This is 1-bit Adam (Tang et al., ICML 2021).

[Note: frozen] At the freeze v and its bias correction become constant; m and its correction go on.
An element that has had no gradient by then has v = 0, and would step by m / eps. So v is at least
FLOOR times its mean over those elements of the tensor that had a gradient; in a tensor without any,
v is that mean over all tensors.

[Note: norms of ranks] A step clips to max_norm the norm of the average. Once momentum is averaged,
each rank clips its own gradient before, whose norm is larger, as the noise of its data is not
averaged out; clipped to max_norm, steps would get too short. So some steps before the freeze
compare both norms: from then on ranks clip to max_norm times their ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import ParamsT

from hipress.errors import ConfigError, StateError
from hipress.model.rounding import add_product, total
from hipress.model.shards import local
from hipress.optim.averaging import Averaging

AUTO = "auto"
FLOOR = 0.01
SETTLED = 0.04  # largest relative change of the sum of v in a window
#: steps before which freezes ended up to 20% above float32 (docs/measurements/losses.md) where
#: the learning rate did not fall; none from here on ended more than 1% above
EARLY = 150
LOOKS = 10  # checks of that sum in a window of 1 / (1 - b2) steps
FROZEN = "frozen"  # key in a parameter's state: its steps until the freeze, or UNFROZEN
UNFROZEN = -1  # torch.distributed.checkpoint loads no key that was not there before
SUMS = "v_sums"  # key in the first group: sums of v at the latest checks, oldest first
NORMS = "norms"  # key in the first group: decayed sums of squared norms, of ranks and averages
SAMPLED = 4  # steps from one comparison of norms to the next
KEPT = 0.9  # share of the sums that a comparison keeps


@dataclass(frozen=True)
class _Root:
    """The denominator of a step, and its eps."""

    eps: float
    denominator: Tensor


class Freezing(Averaging):
    """Common parts of Adam and AdamW."""

    BUFFER = "exp_avg"
    freeze: int | str | None = None
    _compares = False  # True if the ratio of norms is asked for

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        freeze: int | str | None = AUTO,
        max_norm: float | None = None,
        rank_norm: float | None = None,
        scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        """Arguments of torch's optimizer, and four more.

        Args:
            freeze: number of steps after which v is constant; "auto": when over 1 / (1 - b2) steps
                the sum of v changed by less than 4% and the learning rate did not rise; None:
                never.
            max_norm: largest norm of gradients: of the average before the freeze, as by
                clip_grad_norm_; afterwards see rank_norm.
            rank_norm: largest norm of a rank's gradient after the freeze; by default max_norm times
                the ratio of ranks' norms to the average's before the freeze, see
                [Note: norms of ranks].
            scaler: the GradScaler that calls `step`, since momentum is averaged in its scale.

        Raises ConfigError for options of torch's that cannot go on after a freeze.
        """
        norms = {"max_norm": max_norm, "rank_norm": rank_norm}
        super().__init__(params, *args, **norms, scaler=scaler, **kwargs)
        if freeze != AUTO and freeze is not None and (type(freeze) is not int or freeze < 1):
            raise ConfigError(f'freeze is a number of steps, "auto" or None, not {freeze!r}')
        self.freeze, self._compares = freeze, max_norm is not None and rank_norm is None
        self._rates: list[float] = []
        self._highest = 0.0  # rate so far
        self._halfway: list[float] = []  # sums of v after half of the steps to the freeze
        self._roots: dict[Tensor, _Root] = {}
        self.phase.momentum = False
        self._set_defaults()
        for name in ("amsgrad", "capturable", "differentiable"):
            if freeze is not None and any(group[name] for group in self.param_groups):
                raise ConfigError(f"{name}=True cannot go on after a freeze: pass freeze=None")
        if scaler is not None and any(group["fused"] for group in self.param_groups):
            raise ConfigError("fused=True unscales for itself: leave it out with scaler=")

    def _set_defaults(self) -> None:
        self.param_groups[0].setdefault(SUMS, [])
        self.param_groups[0].setdefault(NORMS, [0.0, 0.0])

    @property
    def averages(self) -> bool:
        """Implements Averaging.averages: True with a freeze."""
        return self.freeze is not None

    @property
    def samples(self) -> bool:
        """Implements Averaging.samples: before the freeze, see [Note: norms of ranks]."""
        wanted = self._compares and self.averages and not self.phase.momentum
        return wanted and self.steps % SAMPLED == 0

    @property
    def facts(self) -> dict[str, Any]:
        """Implements Averaging.facts."""
        frozen = {"frozen": self.phase.momentum, "steps": self.steps}
        facts = super().facts | {"freeze": self.freeze} | frozen
        if self._compares:
            del facts["rank_norm"]  # each rank's own
        return facts

    @property
    def steps(self) -> int:
        """Steps so far, of the parameter with most."""
        return max((int(each["step"]) for each in self.state.values() if each), default=0)

    def weight(self, group: Any) -> float:
        """Implements Averaging.weight: `exp_avg` is (1 - b1) times the sum of b1^k g."""
        b1 = float(group["betas"][0])
        return (-1.0 if group["maximize"] else 1.0) * b1 / (1.0 - b1)

    def due(self) -> bool:
        """True if the freeze is due before the next step; call once between two steps. Raises
        ConfigError if the learning rate still rises at the given number of steps."""
        if self.freeze is None or self.phase.momentum:
            return False
        steps, before = self.steps, self._rates
        self._rates = [float(group["lr"]) for group in self.param_groups]
        self._highest = max(self._highest, *self._rates)
        if self.freeze != AUTO and steps == int(self.freeze) // 2 > 0:
            self._halfway = self._sums()
        rising = len(before) == len(self._rates) and any(map(float.__gt__, self._rates, before))
        if self.freeze == AUTO:
            return self._settled(steps) and not rising
        if steps >= int(self.freeze) and rising:
            raise ConfigError(
                f"freeze={self.freeze}: the learning rate still rises, to {max(self._rates):g} "
                f"after step {steps}: freeze after its warm-up, or pass "
                'freeze="auto", which waits for that'
            )
        return steps >= int(self.freeze)

    @property
    def early(self) -> str:
        """A sentence on a freeze that is due now, if its number of steps cost loss in measurements;
        else ""."""
        steps = self.steps
        falls = max(self._rates, default=0.0) < 0.99 * self._highest
        if self.freeze == AUTO or steps >= EARLY or falls:
            return ""
        moved = ""
        if self._halfway:
            pairs = zip(self._halfway, self._sums(), strict=True)
            roots = [abs((now / before) ** 0.5 - 1) for before, now in pairs if before]
            sizes = f"{sum(roots) / max(1, len(roots)):.0%}, at most {max(roots, default=0.0):.0%}"
            moved = f"; the root of a tensor's v has changed by {sizes}, since step {steps // 2}"
        return (
            f"v is frozen after {steps} steps and a learning rate that has not fallen{moved}. In "
            f"measurements freezes before step {EARLY} ended up to 20% above float32's loss then, "
            "and later ones at most 1%"
        )

    def _sums(self) -> list[float]:
        """Bias-corrected sums of v, by tensor."""
        sums = []
        for parameter, group in self.groups().items():
            state = self.state.get(parameter, {})
            steps = int(state.get("step", 0))
            correction = 1 - float(group["betas"][1]) ** steps
            sums.append(total(local(state["exp_avg_sq"])) / correction if steps else 0.0)
        return sums

    def _compare(self, rank: float, average: float) -> None:
        """Take squared norms, of a rank's gradient and of the average, if they are finite."""
        group = self.param_groups[0]
        if rank + average < float("inf"):  # never in place: states share the sums
            pairs = zip(group[NORMS], (rank, average), strict=True)
            group[NORMS] = [KEPT * before + now for before, now in pairs]

    def freeze_now(self) -> None:
        """Freeze v; from now on ranks average the momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = torch.zeros_like(parameter)
                state[FROZEN] = int(state["step"])
        self._roots.clear()
        self.phase.momentum = True
        self._clip_ranks()

    def _clip_ranks(self) -> None:
        """Choose what a frozen optimizer clips ranks to."""
        rank, average = self.param_groups[0][NORMS]
        if self._compares and self.max_norm is not None:
            ratio = (rank / average) ** 0.5 if average else 1.0
            self.rank_norm = self.max_norm * max(1.0, ratio)

    def __getstate__(self) -> dict[str, Any]:
        own = {"freeze": self.freeze, "_compares": self._compares}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._roots, self._rates, self._highest, self._halfway = {}, [], 0.0, []
        self._set_defaults()
        marks = [each.get(FROZEN, UNFROZEN) for each in self.state.values() if each]
        frozen = {mark != UNFROZEN for mark in marks}
        if len(frozen) > 1:
            raise StateError("some parameters of the state are frozen and others are not")
        if True in frozen and self.freeze is None:
            raise StateError("the state is frozen: make the optimizer with freeze=, too")
        self.phase.momentum = True in frozen
        if self.phase.momentum:
            self._clip_ranks()

    def _plain(self) -> None:
        super()._plain()
        if self.averages:
            for parameter in self._used():
                self.state[parameter].setdefault(FROZEN, UNFROZEN)

    def _clip(self) -> Tensor | None:
        norm, square = super()._clip(), self.phase.rank_square
        if norm is not None and square is not None:
            self._compare(float(square), float(norm) ** 2)
        self.phase.rank_square = None
        return norm

    def _advance(self) -> None:
        if self.phase.undo is None and self.due():
            self.freeze_now()
        if not self.phase.momentum:
            self._plain()
            return
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            if used:
                self._step_frozen(group, used)

    def _step_frozen(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        b1, lr, decay = float(group["betas"][0]), float(group["lr"]), group["weight_decay"]
        weight = self.weight(group)
        for parameter in params:
            if self.phase.weight(parameter) is None:
                buffer = self.buffer(parameter)
                add_product(local(parameter.grad), buffer, weight)  # type: ignore[arg-type]
        values = [local(p).detach() for p in params]
        moved = [local(p.grad) for p in params]  # type: ignore[arg-type]
        moments = [local(self.state[p]["exp_avg"]) for p in params]
        steps = [self.state[p]["step"] for p in params]
        torch._foreach_add_(steps, 1)
        if decay and not group["decoupled_weight_decay"]:
            sign = -1.0 if group["maximize"] else 1.0
            moved = list(torch._foreach_add(moved, values, alpha=sign * decay))
        elif decay:
            torch._foreach_mul_(values, 1 - lr * decay)
        scale_into(moments, moved, (1 - b1) * (-1.0 if group["maximize"] else 1.0))
        rates = [-lr / (1 - b1 ** int(step)) for step in steps]
        torch._foreach_addcdiv_(values, moments, self._denominators(group, params), rates)

    def _denominators(self, group: dict[str, Any], params: Sequence[Tensor]) -> list[Tensor]:
        """Denominators of a step of these parameters; cached, since v is constant."""
        eps = float(group["eps"])
        for parameter in params:
            if parameter not in self._roots or self._roots[parameter].eps != eps:
                self._roots[parameter] = _Root(eps, self._root(parameter, group).add_(eps))
        return [self._roots[parameter].denominator for parameter in params]

    def _root(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Root of a parameter's v, see [Note: frozen]."""
        state = self.state[parameter]
        v = local(state["exp_avg_sq"])
        mean = self._mean(parameter, group)
        if mean is None:
            known = [self._mean(p, each) for p, each in self.groups().items()]
            means = [each for each in known if each is not None]
            return torch.full_like(v, (sum(means) / max(1, len(means))) ** 0.5)
        correction: float = 1 - float(group["betas"][1]) ** state[FROZEN]
        root: Tensor = (v.float() / correction).clamp_min_(FLOOR * mean).sqrt_()
        return root.to(v.dtype)

    def _mean(self, parameter: Tensor, group: dict[str, Any]) -> float | None:
        """Mean of a tensor's corrected v over elements that had a gradient; None if none had."""
        state = self.state[parameter]
        v = local(state["exp_avg_sq"])
        seen = int(v.count_nonzero())
        if not seen or not state[FROZEN]:
            return None
        correction: float = 1 - float(group["betas"][1]) ** state[FROZEN]
        return total(v) / seen / correction

    def _settled(self, steps: int) -> bool:
        """True by 1-bit Adam's rule: over 1 / (1 - b2) steps the sum of v hardly changed."""
        group = self.param_groups[0]
        every = max(1, round(1 / (1 - float(group["betas"][1])) / LOOKS))
        if steps == 0 or steps % every:
            return False
        squares = [local(each["exp_avg_sq"]) for each in self.state.values() if each]
        now = sum(map(total, squares))
        sums = group[SUMS] = [*group[SUMS], now][-LOOKS - 1 :]  # never in place: states share it
        return len(sums) > LOOKS and abs(now - sums[0]) < SETTLED * sums[0]


class Adam(Freezing, torch.optim.Adam):
    """torch.optim.Adam, with its arguments and states, that averages momentum like AdamW."""


class AdamW(Freezing, torch.optim.AdamW):
    """torch.optim.AdamW with the same arguments and states, bit for bit until v is frozen; from
    then on ranks average the momentum, for example at one bit. Its states also load into torch's.
    """


def scale_into(targets: list[Tensor], sources: list[Tensor], factor: float) -> None:
    """Write factor * sources to targets."""
    if targets[0].is_cuda:
        torch._foreach_copy_(targets, sources)
        torch._foreach_mul_(targets, factor)
        return
    for target, source in zip(targets, sources, strict=True):  # one pass
        torch.mul(source, factor, out=target)
