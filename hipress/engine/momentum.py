"""Momentum in an engine's averages: see [Note: averages of momentum] in hipress/optim."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from casync.codec import Codec
from hipress.codecs import owed_names
from hipress.engine.residuals import Residuals
from hipress.engine.scaling import set_scaler
from hipress.errors import ConfigError
from hipress.model.params import Param
from hipress.model.shards import is_sharded
from hipress.optim import Averaging
from hipress.optim.adam import Freezing
from hipress.optim.optimizer_kinds import refuse_foreign
from hipress.optim.phase import marks_of
from hipress.options import AUTO, Options

__all__ = ["Momentum", "check"]

#: indices of parameters, and their flat gradients
FlatGradients = tuple[Sequence[int], torch.Tensor]


class Step(Protocol):
    """A step that can be undone: see Reduction."""

    def keep(self, indices: Iterable[int]) -> None:
        """Copy these parameters' states."""
        ...

    def undo(self, indices: Collection[int]) -> None:
        """Give them back, as these parameters' averages are dropped."""
        ...


class Momentum:
    """Adds an optimizer's momentum to gradients as an engine takes them. Refers to
    parameters, never to the module."""

    def __init__(
        self,
        optimizer: Averaging,
        parameters: Sequence[torch.Tensor],
        params: Sequence[Param],
        *,
        unused: bool,
    ) -> None:
        """parameters: in the engine's order. unused: True if averages of parameters that no rank
        used are silently dropped."""
        if optimizer.phase.undo is not None:
            raise ConfigError(
                f"this {type(optimizer).__name__} steps a module that hipress synchronizes "
                "already: hipress.detach that first, or make an optimizer for each"
            )
        refuse_foreign(optimizer, parameters)
        _refuse_shards(optimizer, parameters)
        self._optimizer, self.phase = optimizer, optimizer.phase
        self._parameters, self._params = parameters, params
        self._index = {parameter: index for index, parameter in enumerate(parameters)}
        self._unused = unused
        self._groups = optimizer.groups()
        self._sampled: Collection[torch.Tensor] = frozenset()  # parameters of a norm that is wanted
        self._norms: dict[int, torch.Tensor] = {}  # of their gradients, by index
        self._buckets: list[FlatGradients] = []  # of the step, with momentum
        self._step: Step | None = None  # the last one
        if optimizer.scaler is not None and optimizer.scaler.is_enabled():
            set_scaler(optimizer.scaler, optimizer)
        self.phase.undo = self._undo

    def begin(self, step: Step, residuals: Residuals) -> None:
        """Begin a step with these residuals; its first bucket is ready."""
        optimizer = self._optimizer
        self._buckets.clear()
        self._sampled = optimizer.groups().keys() if optimizer.samples else frozenset()
        self._norms.clear()
        self.phase.rank_square = None
        self._step = step
        self._groups = optimizer.groups() if self.phase.momentum else {}
        if self._groups and optimizer.scaler is not None and optimizer.scaler.is_enabled():
            step.keep(residuals.places)

    def take(self, indices: Sequence[int], buffer: torch.Tensor) -> bool:
        """Add momentum to a ready bucket; True if it has to wait for all others first: see
        release."""
        if self._sampled and not buffer.is_sparse:
            self._sample(indices, buffer)
        if not self._groups or buffer.is_sparse:
            return False
        self._buckets.append((indices, buffer))
        if self._optimizer.rank_norm is not None:
            return True
        self._enter(indices, buffer)
        return False

    def release(self) -> None:
        """Clip the gradient of all buckets of the step, which have waited, and add momentum."""
        self._clip(self._buckets)
        for bucket in self._buckets:
            self._enter(*bucket)

    def take_averages(self) -> None:
        """Take the averages, which are all complete."""
        if self._norms:
            norms = [self._norms[index] for index in sorted(self._norms)]  # in whatever buckets
            self.phase.rank_square = torch.stack(norms).square().sum()
        if not self._buckets:
            return
        wants = self.phase.wants_norms
        marks: dict[torch.Tensor, torch.Tensor] = {}
        for bucket in self._buckets:
            pieces = dict(self._pieces(*bucket))
            if pieces:  # otherwise the bucket may be empty
                entered = [self._parameters[index] for index in pieces]
                rows = marks_of([*pieces.values()], wants)
                marks.update(zip(entered, rows, strict=True))
        self._buckets.clear()
        self.phase.take_marks(marks)

    def close(self) -> None:
        """End: the optimizer now steps by itself."""
        self.phase.undo = None
        self.phase.clear()

    def _pieces(
        self, indices: Sequence[int], buffer: torch.Tensor
    ) -> list[tuple[int, torch.Tensor]]:
        """Pieces of a bucket for the optimizer's parameters: by index, in their own layout."""
        pieces = torch.split(buffer, [self._params[index].reals for index in indices])
        return [
            (index, piece)
            for index, piece in zip(indices, pieces, strict=True)
            if self._parameters[index] in self._groups and piece.numel()
        ]

    def _sample(self, indices: Sequence[int], buffer: torch.Tensor) -> None:
        """Keep the norms of a bucket's gradients of sampled parameters."""
        pieces = torch.split(buffer, [self._params[index].reals for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            if self._parameters[index] in self._sampled:
                self._norms[index] = piece.norm(dtype=torch.float32)

    def _enter(self, indices: Sequence[int], buffer: torch.Tensor) -> None:
        for index, piece in self._pieces(indices, buffer):
            param, parameter = self._params[index], self._parameters[index]
            if self._unused and self._step is not None and not piece.any():
                self._step.keep([index])
            share = self._optimizer.enter(parameter, self._groups[parameter])
            if share is not None:
                momentum, weight = share
                laid = piece.as_strided(param.shape, param.layout)
                laid.add_(momentum, alpha=weight)

    def _clip(self, every: Sequence[FlatGradients]) -> None:
        """Scale this rank's gradient to at most the norm that the optimizer asks for."""
        pieces = [piece for bucket in every for _, piece in self._pieces(*bucket)]
        if not pieces:
            return
        norms = [piece.norm(dtype=torch.float32) for piece in pieces]
        most, norm = self._optimizer.rank_norm, torch.stack(norms).norm()
        assert most is not None  # otherwise nothing waits
        torch._foreach_mul_(pieces, (most / (norm + 1e-6)).clamp(max=1.0))

    def _undo(self, parameters: Collection[torch.Tensor]) -> None:
        """Restore these parameters' states from before the step, as averages are dropped."""
        if self._step is not None:
            self._step.undo({self._index[p] for p in parameters if p in self._index})


def _refuse_shards(optimizer: Averaging, parameters: Iterable[torch.Tensor]) -> None:
    """Raise ConfigError for options that need all shards, if this rank has only one."""
    if not any(map(is_sharded, parameters)):
        return
    if optimizer.max_norm is not None:
        raise ConfigError(
            "max_norm needs whole gradients, and this rank has only shards: leave it out"
        )
    if isinstance(optimizer, Freezing) and optimizer.freeze == AUTO:
        raise ConfigError(
            'freeze="auto" needs all of v, and this rank has only shards: pass a number of steps'
        )


def check(
    optimizer: Averaging, params: Iterable[Param], codec: Codec | None, options: Options
) -> None:
    """Raise ConfigError for options that exclude averages of this optimizer's momentum. codec: the
    requested one, if any."""
    name = type(optimizer).__name__
    if options.policy is not None:
        raise ConfigError(
            f"a policy needs gradients, and ranks average the momentum of hipress.optim.{name}: "
            f"pass one of them, or torch.optim.{name}"
        )
    for param in params:
        if param.dtype.is_complex:
            raise ConfigError(f"{param.name!r} is complex: ranks cannot average its momentum")
    if codec is None or codec.additive == "float32":
        return
    if not owed_names(codec):
        states = " and ".join(sorted(state.name for state in codec.states))
        feedback = f"keeps {states} of its own" if states else "has no feedback"
        raise ConfigError(
            f"{codec.name!r} {feedback}, and ranks average the momentum of hipress.optim.{name}, "
            "which needs feedback and nothing else: pass such as 'onebit_fine', or freeze=None or "
            f"torch.optim.{name} for averages of gradients"
        )
