"""Residuals and other codec states: their places, and their moves.

[Note: state] DDP delivers one set of buckets at iteration 0 and another from iteration 1 on, so
state belongs to parameters, never to buckets. With scope "tensor" there is one arena per codec and
side: flat arrays over the parameters of that codec, in the model's order, and a parameter's place
in it never changes. With scope "bucket" a unit is a run of a bucket and its state must be
contiguous in the bucket's order; each bucket has an arena, and when DDP makes new buckets the
values move to the new arena by parameter name. The aggregator's residual of elements whose owner
changes with the buckets is left behind, once, after iteration 0.

With scope "bucket" an aggregator's arena holds all elements, since owners change with the buckets,
and may change back.

[Note: unused parameters] With find_unused_parameters DDP drops the average of a parameter that no
rank used in a step, and with it the sent part of its residuals. So residuals wait while the input
of their encode is zero: see [Note: deferred feedback] in runtime/deferral.py. With scope "bucket"
this holds for runs of a bucket that are unused as a whole. The momentum of dgc waits with its sum,
as that of an optimizer waits without a gradient. States of codecs that encode zeros as other values
do not wait: signum keeps voting, by its momentum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch

from casync import strategies
from casync.codec import Codec, one_piece
from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.runtime.deferral import as_torch
from hipress.channel.states import Arena, Runs, Slice, States, sides_of
from hipress.choose.plan import Plan
from hipress.codecs import flat_names, owed_names, state_of
from hipress.model.params import Param


class Residuals(States[int]):
    """The states of all parameters of a model, by a parameter's index."""

    def __init__(
        self,
        params: Sequence[Param],
        plan: Plan,
        owned: Mapping[int, Runs] | None = MappingProxyType({}),
        memory: Memory | None = None,
    ) -> None:
        """owned: elements that this rank aggregates, by parameter; None with scope "bucket", where
        buckets decide. memory: by default the host's."""
        super().__init__(plan.topology.world_size, memory or HostMemory())
        self.params, self.plan, self.owned = params, plan, owned

    def place_all(self) -> list[Arena]:
        """Arenas, one per codec over all its parameters in the model's order (scope "tensor")."""
        keys = dict.fromkeys(d.codec for d in self.plan.decisions if d.codec is not None)
        return [
            self.place(key, [p.index for p in self.params if self.codec_of(p.index) == key])
            for key in keys
            if self.stateful(key)
        ]

    def stateful(self, key: str) -> bool:
        """True if either side of parameters with this codec keeps state."""
        return any(codec.states for codec in self.codecs_of(key).values())

    def codec_of(self, index: int) -> str | None:
        """Key of a parameter's codec."""
        return self.plan.decisions[index].codec

    def state_scheme(self, index: int) -> str:
        """Text on the way of a parameter, which decides the meaning and the place of its state:
        `ring` keeps at workers what `ps` keeps at aggregators, `exchange` keeps shares of the
        mean, and `hierarchical` keeps a node's state at its leaders."""
        strategy = self.plan.decisions[index].strategy
        if strategies.over_nodes(strategy):
            strategy = f"{strategy} over {self.plan.topology}"
        return strategy if self.owned is not None else f"{strategy} by buckets"

    def place(self, key: str, indices: Sequence[int]) -> Arena:
        """A new arena that holds `indices` in this order; their earlier values move in."""
        slices = [
            Slice(i, self.params[i].numel, self.plan.decisions[i].strategy, i) for i in indices
        ]
        begins = accumulate((each.length for each in slices), initial=0)
        spans, owned = None, self.owned
        if owned is not None:
            runs = {at: owned[i].runs for i, at in zip(indices, begins, strict=False) if i in owned}
            spans = Runs((at + first, many) for at, some in runs.items() for first, many in some)
        return self.allocate(
            key, self.codecs_of(key), slices, owned=spans, tensors=len(self.params)
        )

    def whole(self, name: int) -> dict[str, dict[str, torch.Tensor]]:
        """Extends States.whole: zeros for a parameter that has no place yet (scope "bucket", before
        a step)."""
        if name in self.places:
            return super().whole(name)
        apart = Residuals(self.params, self.plan, self.owned)
        apart.place(str(self.codec_of(name)), [name])
        return apart.whole(name)

    def lay_out(self, old: Param, new: Param) -> None:
        """Move a parameter's state to a new layout of its elements."""
        if old.index not in self.places:
            return
        pieces = self.arrays(old.index)
        for side, arrays in self.whole(old.index).items():
            for name, values in arrays.items():
                if values.numel() == old.numel:
                    moved = in_layout(in_shape(values, old), new)
                    spans = self.spans(old.index, side, name)
                    as_torch(pieces[side][name]).copy_(spans.of(moved))

    def codecs_of(self, key: str) -> dict[str, Codec]:
        """Codecs by side that keeps state, for parameters whose workers use codec `key`."""
        ways = [d.strategy for d in self.plan.decisions if d.codec == key]
        return sides_of(self.plan.codecs[key], self.plan.down(key), dict.fromkeys(ways))


def in_shape(flat: torch.Tensor, param: Param) -> torch.Tensor:
    """A parameter's flat values in bucket order, viewed in its shape."""
    return flat.as_strided(param.shape, param.layout)


def in_layout(values: torch.Tensor, param: Param) -> torch.Tensor:
    """The inverse of `in_shape`: a flat copy."""
    laid = torch.empty_strided(param.shape, param.layout, dtype=values.dtype, device=values.device)
    return laid.copy_(values).as_strided((param.numel,), (1,))


def deferrable_states(codec: Codec, memory: Memory | None = None) -> tuple[str, ...]:
    """Names of the states that wait while a parameter is unused. See [Note: unused parameters].

    memory: the memory that the codec works in; by default the host's.
    """
    if codec.difference is not None:
        return ()  # references follow a gradient of zeros, with or without its average
    names, owed = flat_names(codec), owed_names(codec)
    rounds = bool(codec.rounds)  # some of their states are shared by ranks
    if names <= owed or rounds or not _silent(codec, memory or HostMemory()):
        names &= owed
    return tuple(sorted(names))


def _silent(codec: Codec, memory: Memory) -> bool:
    """True if the codec, without state, sends and keeps only zeros for zeros."""
    count, stream, done = max(64, codec.align), memory.caller(), memory.event()
    table, at = one_piece(count)
    x = memory.zeros(count, torch.float32)
    values, state = memory.array(x), state_of(codec, memory, count)
    out = memory.array(memory.zeros(codec.payload_bytes(count), torch.uint8))

    def work() -> None:
        used = codec.encode_batch(values, table, out, at, state=state)
        codec.decode_batch(out, table, at, used, values)

    stream.run(work)
    stream.record(done)
    done.wait()
    return not x.cpu().any() and not any(state[name].any() for name in flat_names(codec))
