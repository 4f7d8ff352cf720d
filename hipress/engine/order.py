"""Gradients of a module without DDP: their buckets, and the order of these.

[Note: one order] All ranks must hand buckets to the engine in one order, but a backward pass may
compute gradients in a different order on each rank. So the order is that of rank 0's first backward
pass, and a bucket that is ready early is held back until all before it have gone. Buckets that are
left at the end of a step, since parameters were unused, go then, in that order, too: by then the
ranks have told each other the parameters that any of them used, and all leave out those that none
used. So no rank waits in a backward pass for data that another sends only at the end of its step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from hipress.choose.plan import Plan
from hipress.model.params import Param
from hipress.options import Options

#: least bytes of a gradient that is encoded in place: a copy costs more than a job of its own
LARGE_BYTES = 1 << 20
#: bytes of gradients, large ones in between included, that close a gathered bucket: DDP's default
BUCKET_BYTES = 25 << 20


class Bucket:
    """Gradients that are synchronized as one flat tensor."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.params = tuple(params)
        self.indices = tuple(param.index for param in params)
        self._views: list[torch.Tensor] = []  # of the buffer, by parameter
        self._flat = torch.empty(0, device="cpu")

    def gather(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradients one behind the other, each in its parameter's layout; a single gradient
        with this layout stays in its own memory."""
        if len(gradients) == 1 and (gradients[0].is_sparse or self._in_place(gradients[0])):
            only = gradients[0].detach()
            return only if only.is_sparse else _reals(only.as_strided((only.numel(),), (1,)))
        if not self._views:
            self._allocate()
        for view, gradient in zip(self._views, gradients, strict=True):
            view.copy_(gradient.detach())
        return self._flat

    def scatter(self, averages: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Copy the averages back if `gather` copied the gradients."""
        if averages is not self._flat:
            return
        for view, gradient in zip(self._views, gradients, strict=True):
            gradient.detach().copy_(view)

    def _in_place(self, gradient: torch.Tensor) -> bool:
        (param,) = self.params
        if gradient.dtype != param.dtype or gradient.is_conj() or gradient.is_neg():
            return False
        return gradient.stride() == param.layout or (gradient.is_contiguous() and not param.strides)

    def _allocate(self) -> None:
        types = {param.dtype for param in self.params}
        kind = types.pop() if len(types) == 1 else torch.float32
        sizes = [param.numel for param in self.params]
        buffer = torch.empty(sum(sizes), dtype=kind, device=self.params[0].device)
        self._flat = _reals(buffer)
        self._views = [
            piece.as_strided(param.shape, param.layout)
            for piece, param in zip(torch.split(buffer, sizes), self.params, strict=True)
        ]


def _reals(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor with complex numbers as pairs, as in DDP's buckets."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def buckets(order: Sequence[Param], plan: Plan, options: Options) -> list[Bucket]:
    """Buckets of parameters whose gradients come in this order, ordered by their last ones.

    With scope "tensor" large gradients go alone, and small ones of a type are gathered. With
    "bucket" and "model" all compressible gradients are gathered, whatever their types.
    """
    order = [param for param in order if param.numel]
    groups: list[list[Param]] = []
    gathered: dict[torch.dtype | None, list[Param]] = {}
    passed = 0
    for param in order:
        if param.sparse or (options.scope == "tensor" and param.nbytes >= LARGE_BYTES):
            groups.append([param])
        else:
            joins = options.scope != "tensor" and plan.decisions[param.index].codec is not None
            gathered.setdefault(None if joins else param.dtype, []).append(param)
        passed += param.nbytes
        if passed >= BUCKET_BYTES and options.scope != "model":
            groups += gathered.values()
            gathered, passed = {}, 0
    groups += gathered.values()
    place = {param.index: number for number, param in enumerate(order)}
    groups.sort(key=lambda params: place[params[-1].index])
    return [Bucket(params) for params in groups]


class BucketOrder:
    """The order of buckets, and how far it has gone in a step. See [Note: one order]."""

    def __init__(self, order: Sequence[Bucket]) -> None:
        self._order = order
        self._bucket = {i: number for number, b in enumerate(order) for i in b.indices}
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._missing = [len(bucket.indices) for bucket in self._order]
        self._next = 0

    def ready(self, index: int) -> Iterator[Bucket]:
        """Buckets that may go after this parameter's gradient is ready."""
        if index in self._bucket:  # empty parameters have no bucket
            self._missing[self._bucket[index]] -= 1
        while self._next < len(self._order) and self._missing[self._next] == 0:
            self._next += 1
            yield self._order[self._next - 1]

    @property
    def incomplete(self) -> bool:
        """True if a bucket has not gone."""
        return self._next < len(self._order)

    def rest(self, unused: Collection[int]) -> Iterator[Bucket]:
        """The buckets that have not gone, except those with only unused parameters."""
        remaining, self._next = self._order[self._next :], len(self._order)
        return (bucket for bucket in remaining if not set(bucket.indices) <= set(unused))
