"""Base of optimizers whose momentum is averaged: see [Note: averages of momentum]."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hipress import compat
from hipress.errors import ConfigError, SyncError
from hipress.model.rounding import add_product
from hipress.model.shards import local

CHANGED = 1e-3  # relative: larger than the rounding of unscaling
CHECKED = 8  # averages from one check of norms to the next


class Averaging(Optimizer):
    """A mixin before an optimizer of torch. `enter` adds the momentum to gradients before they are
    averaged; `step` then finds the new momentum in `.grad`."""

    #: key of a parameter's momentum in its state
    BUFFER: ClassVar[str]

    max_norm: float | None = None
    #: of each rank's gradient where momentum is averaged; None without max_norm
    rank_norm: float | None = None
    scaler: GradScaler | None = None
    #: called with parameters whose averages were of no use: unused ones, or those that are not
    #: finite; None if nothing averages by this optimizer
    told: Callable[[Collection[Tensor]], None] | None = None
    #: weight of the buffer, by parameter whose `.grad` will be the averaged momentum
    _entered: dict[Tensor, float]
    #: last element of the scaled average, and maybe its norm, by such a parameter, once it has
    #: arrived
    _marks: dict[Tensor, Tensor]
    _arrivals = 0  # averages of momentum so far
    _scaled = 1.0  # factor of the scaler in that step
    #: squared norm of this rank's gradient in a step that `samples`, once it has arrived
    rank_square: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        max_norm: float | None = None,
        rank_norm: float | None = None,
        scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        """Arguments of torch's optimizer, and three more: see AdamW. Raises ConfigError."""
        super().__init__(params, *args, **kwargs)
        for name, norm in (("max_norm", max_norm), ("rank_norm", rank_norm)):
            if norm is not None and not 0 < norm < float("inf"):
                raise ConfigError(f"{name} is a finite positive number, or None, not {norm!r}")
        if rank_norm is not None and max_norm is None:
            raise ConfigError("rank_norm goes with max_norm, the norm of the average: pass both")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ConfigError(f"scaler is a torch.amp.GradScaler, not a {type(scaler).__name__}")
        self.max_norm, self.rank_norm, self.scaler = max_norm, rank_norm or max_norm, scaler
        self._entered, self._marks = {}, {}
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise ConfigError for groups without a momentum that ranks could average."""

    @property
    def averages(self) -> bool:
        """True if ranks average the momentum at any time."""
        return True

    @property
    def averaging(self) -> bool:
        """True if the next step averages the momentum instead of the gradient."""
        return True

    @property
    def samples(self) -> bool:
        """True if the norm of this rank's next gradient is wanted, as `rank_square`."""
        return False

    @property
    def facts(self) -> dict[str, Any]:
        """Values in which all ranks must agree, for JSON."""
        norms = {"max_norm": self.max_norm, "rank_norm": self.rank_norm}
        return {"optimizer": type(self).__name__, **norms}

    def weight(self, group: Mapping[str, Any]) -> float:
        """Factor of the buffer in a rank's contribution, beside its gradient."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """Scale of gradients before they are unscaled."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def groups(self) -> dict[Tensor, dict[str, Any]]:
        """Group of each parameter."""
        return {p: group for group in self.param_groups for p in group["params"]}

    def buffer(self, parameter: Tensor) -> Tensor | None:
        """This rank's part of a parameter's momentum; None before its first step."""
        found = self.state.get(parameter, {}).get(self.BUFFER)
        return None if found is None else local(found)

    def enter(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, float] | None:
        """Begin the average of a parameter's momentum.

        Returns a tensor and its factor, for the sum with the rank's gradient that is its share of
        the new momentum; None if there is nothing to add. Raises SyncError if the last average was
        not used.
        """
        if parameter in self._entered:
            raise SyncError(
                "the momentum has been averaged, and no optimizer.step() came after it: run all "
                "backward passes of a step but the last within no_sync(), leave a step out by "
                "optimizer.zero_grad(), and use no join of DDP's, in which a rank without data "
                "takes no step"
            )
        weight, held = self.weight(group), self.buffer(parameter)
        self._entered[parameter], self._scaled = weight, self.scale
        return None if held is None else (held, weight)

    @property
    def wants_norms(self) -> bool:
        """True if the norms of the averages that arrive next are wanted, too: now and then, since
        they cost a pass over the averages (2 ms for 12 million elements), and a check another; and
        with a scaler always, which skips steps that are not finite."""
        return self.scaler is not None or self._arrivals % CHECKED == 0

    def arrived(self, marks: Mapping[Tensor, Tensor]) -> None:
        """Take the last elements of new averages, and their norms if these were wanted: float [1]
        or [2]. If one is not finite, the step is skipped."""
        self._arrivals += 1
        self._marks.update({p: mark for p, mark in marks.items() if p in self._entered})
        values = [*marks.values()] if self.scaler is not None else []
        if values and not torch.stack(values).isfinite().all():
            self._drop(self._entered)

    def forget(self) -> None:
        """Forget averages: no step may use them."""
        self._entered.clear()
        self._marks.clear()

    def _drop(self, parameters: Collection[Tensor]) -> None:
        """Forget averages that no step will use, and report them."""
        dropped = list(parameters)
        if self.told is not None and dropped:
            self.told(dropped)
        for parameter in dropped:
            self._entered.pop(parameter, None)
            self._marks.pop(parameter, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as torch's; forgets averages."""
        self.forget()
        super().zero_grad(set_to_none)

    @compat.untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Same as torch's, with the averages."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._check()
            self._clip()
            self._advance()
        for parameter in self._used():
            self._entered.pop(parameter, None)
            self._marks.pop(parameter, None)
        self._drop([p for p in self.groups() if p in self._entered])
        return loss

    def _advance(self) -> None:
        """A step of torch's by gradients: subtract the momentum's share from each average."""
        for parameter in self._used():
            weight, held = self._entered.get(parameter), self.buffer(parameter)
            if weight is not None and held is not None:
                add_product(local(parameter.grad), held, -weight)  # type: ignore[arg-type]
        self._plain()

    def __getstate__(self) -> dict[str, Any]:
        """Same as torch's, which keeps nothing of a subclass."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"max_norm": self.max_norm, "rank_norm": self.rank_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Same as torch's."""
        super().__setstate__(state)
        self._entered, self._marks = {}, {}

    def _plain(self) -> None:
        compat.unhooked_step(super().step)()

    def _used(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _clip(self) -> Tensor | None:
        """Clip gradients that ranks did not clip before the average; returns their norm before, if
        max_norm is given."""
        if self.max_norm is None:
            return None
        return clip_grad_norm_([p for p in self._used() if p not in self._entered], self.max_norm)

    def _check(self) -> None:
        """Raise SyncError if a gradient differs from its average."""
        used = [p for p in self._used() if p in self._marks]
        if not used:
            return
        norms = self._arrivals % CHECKED == 1 and len(self._marks[used[0]]) == 2
        found = marks_of([local(p.grad) for p in used], norms)  # type: ignore[arg-type]
        wanted = torch.stack([self._marks[p][: 1 + norms] for p in used]) / self._scaled
        if not torch.allclose(found, wanted, CHANGED, 0.0, equal_nan=True):
            name = type(self).__name__
            raise SyncError(
                f"hipress.optim.{name}: a .grad was changed between the average and step(), but "
                "it holds the averaged momentum, no gradient. Instead of clip_grad_norm_ pass "
                f"max_norm= to {name}, which clips each rank's gradient before it enters the "
                "average; where a GradScaler unscales, pass it as scaler="
            )


def marks_of(tensors: Sequence[Tensor], norms: bool) -> Tensor:
    """The last element in memory of each dense tensor, and maybe its norm: float32 [tensors, 1 or
    2]."""
    ends = [held.storage_offset() + held.numel() - 1 for held in tensors]
    pairs = zip(tensors, ends, strict=True)
    lasts = torch.cat([held.as_strided((1,), (1,), end).float() for held, end in pairs])
    if not norms:
        return lasts[:, None]
    wide = any(held.dtype == torch.float64 for held in tensors)
    every = torch._foreach_norm(list(tensors), dtype=torch.float64 if wide else torch.float32)
    return torch.stack((lasts, torch.stack(every).float()), dim=1)
