"""The phase of an optimizer: what ranks average for it, and the averages that no step has used yet.

One object, which the optimizer owns. The engine (hipress/engine/momentum.py) enters gradients and
marks the averages that have arrived, a controller (hipress/choose/chooser.py) lets ranks agree on
the end of the first phase, and the optimizer's step uses the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from hipress.errors import SyncError

__all__ = ["Phase", "marks_of"]

CHANGED = 1e-3  # relative: larger than the rounding of unscaling
CHECKED = 8  # averages from one check of norms to the next


class Phase:
    """Averages of an optimizer's momentum or, before a freeze, of gradients."""

    def __init__(self, *, momentum: bool = True, scaled: bool = False) -> None:
        """momentum: True if ranks average the momentum from the next step on, False if gradients.
        scaled: True if a GradScaler calls `step`."""
        self.momentum, self._scaled = momentum, scaled
        #: squared norm of this rank's gradient in a step that `Averaging.samples`, once it arrived
        self.rank_square: Tensor | None = None
        #: takes back what was sent of parameters whose averages are dropped: unused ones, or those
        #: that are not finite; None if no engine averages by this optimizer
        self.undo: Callable[[Collection[Tensor]], None] | None = None
        self._weights: dict[Tensor, float] = {}  # of buffers in averages that no step has used
        self._marks: dict[Tensor, Tensor] = {}  # of those of them that have arrived: see marks_of
        self._arrivals = 0  # averages so far
        self._scale = 1.0  # of the gradients in them

    def enter(self, parameter: Tensor, weight: float, scale: float) -> None:
        """Begin an average in which the buffer has this weight, and gradients this scale. Raises
        SyncError if no step has used the last one."""
        if parameter in self._weights:
            raise SyncError(
                "the momentum has been averaged, and no optimizer.step() came after it: run all "
                "backward passes of a step but the last within no_sync(), leave a step out by "
                "optimizer.zero_grad(), and use no join of DDP's, in which a rank without data "
                "takes no step"
            )
        self._weights[parameter], self._scale = weight, scale

    def weight(self, parameter: Tensor) -> float | None:
        """Weight of the buffer in the average in `.grad`; None if that is a plain gradient."""
        return self._weights.get(parameter)

    @property
    def wants_norms(self) -> bool:
        """True if the norms of the averages that arrive next are wanted, too: now and then, since
        they cost a pass over the averages (2 ms for 12 million elements), and a check another; and
        with a scaler always, which skips steps that are not finite."""
        return self._scaled or self._arrivals % CHECKED == 0

    def take_marks(self, marks: Mapping[Tensor, Tensor]) -> None:
        """Take the marks of new averages. If one is not finite, a scaler skips the step."""
        self._arrivals += 1
        self._marks.update({p: mark for p, mark in marks.items() if p in self._weights})
        values = [*marks.values()] if self._scaled else []
        if values and not torch.stack(values).isfinite().all():
            self.drop(self._weights)

    def unchanged(self, gradients: Mapping[Tensor, Tensor]) -> bool:
        """True if these gradients, dense and by parameter, are the averages as they arrived."""
        marked = {p: gradient for p, gradient in gradients.items() if p in self._marks}
        if not marked:
            return True
        norms = self._arrivals % CHECKED == 1 and len(self._marks[next(iter(marked))]) == 2
        wanted = torch.stack([self._marks[p][: 1 + norms] for p in marked]) / self._scale
        marks = marks_of([*marked.values()], norms)
        return torch.allclose(marks, wanted, CHANGED, 0.0, equal_nan=True)

    def use(self, parameters: Collection[Tensor]) -> None:
        """Forget averages that a step has used; drop those that it left out."""
        for parameter in parameters:
            self._weights.pop(parameter, None)
            self._marks.pop(parameter, None)
        self.drop(self._weights)

    def drop(self, parameters: Collection[Tensor]) -> None:
        """Forget averages that no step will use, and take back what was sent of them."""
        dropped = list(parameters)
        if self.undo is not None and dropped:
            self.undo(dropped)
        for parameter in dropped:
            self._weights.pop(parameter, None)
            self._marks.pop(parameter, None)

    def clear(self) -> None:
        """Forget all averages: no step may use them."""
        self._weights.clear()
        self._marks.clear()


def marks_of(tensors: Sequence[Tensor], norms: bool) -> Tensor:
    """The last element in memory of each dense tensor, and maybe its norm: float32 [tensors, 1 or
    2]."""
    ends = [tensor.storage_offset() + tensor.numel() - 1 for tensor in tensors]
    pairs = zip(tensors, ends, strict=True)
    lasts = torch.cat([tensor.as_strided((1,), (1,), end).float() for tensor, end in pairs])
    if not norms:
        return lasts[:, None]
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    every = torch._foreach_norm(list(tensors), dtype=torch.float64 if wide else torch.float32)
    return torch.stack((lasts, torch.stack(every).float()), dim=1)
