"""all_reduce: one tensor, compressed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, SupportsIndex, TypeAlias

import torch
import torch.distributed as dist

from casync.codec import Codec
from casync.rounds import refuse_workers
from casync.shutdown import end_with
from hipress import options as options_
from hipress.arguments import group_of
from hipress.engine.exchange import ROOM, Exchange, Piece
from hipress.engine.futures import wait_within
from hipress.errors import ConfigError
from hipress.model.devices import ON_HOST, Placement
from hipress.model.params import COMPRESSIBLE
from hipress.model.shards import is_sharded
from hipress.model.torch_modes import without_inference_mode
from hipress.options import AUTO, Options
from hipress.plan.codecs import resolve, resolve_down, strategy_for
from hipress.ranks import coordinator as coordinators
from hipress.ranks.link import group_timeout

NATIVE = ("allreduce", "hierarchical")  # strategies with native sums
#: topology, seed, where tensors are, and bytes of tensors whose programs are kept
_Kind: TypeAlias = tuple[str, int, Placement, int | None]


@without_inference_mode()
def all_reduce(
    tensor: torch.Tensor,
    compressor: str | os.PathLike[str] | Codec,
    *,
    strategy: str = AUTO,
    down: str | os.PathLike[str] | Codec | None = AUTO,
    topology: SupportsIndex | Iterable[Iterable[SupportsIndex]] | None = None,
    seed: SupportsIndex = 0,
    timeout: float | timedelta | None = None,
    name: str = "",
    process_group: dist.ProcessGroup | None = None,
    **params: Any,
) -> torch.Tensor:
    """Average `tensor` over the ranks, compressed, in place; the same bits on every rank.

    tensor: on the CPU, of float32, float16 or bfloat16, of any shape; it is compressed as a whole.
    `compressor`, `strategy`, `down`, `topology`, `seed`, `timeout` and `params` as for `wrap`, but
    compressor "auto" is not allowed. Every rank of `process_group` (all ranks, by default) must
    call this, with the same arguments.

    name: of the tensor, for errors: ranks that average different ones at a time name both.

    No residual is kept: values that the codec leaves out are lost, as in the first step of a
    training. Stochastic codecs draw anew in each call, by `seed` and the number of earlier calls.
    The first call with a seed and topology connects the ranks, and the first one with a codec and
    length plans; later ones only send. Plans of the longest unused lengths go: memory is bounded.
    With one rank, nothing happens.

    Raises ConfigError, ConfigMismatch and AgreementTimeout as `wrap`; for a failure on the way
    RankLost, AgreementTimeout or SyncError, which names rank, peer and task.
    """
    group = group_of(process_group)
    with closing_on_failure(group):
        options = options_.make(
            compressor, strategy=strategy, down=down, topology=topology, seed=seed, params=params,
            timeout=group_timeout(group) if timeout is None else timeout,
        )  # fmt: skip
        _refuse(tensor, options)
        codec = resolve(options)
        other = resolve_down(options, codec)
        strategy = strategy_for(codec, options.strategy, other)
        if refusal := refuse_workers(codec, group.size()):
            raise ConfigError(refusal)
        if group.size() > 1 and tensor.numel():
            exchange = group_exchanges(group, options).exchange(options, most=ROOM)
            up, back = exchange.add(codec), None if other is None else exchange.add(other)
            flat = tensor.detach().resolve_neg().contiguous().view(-1)
            piece, name = Piece(flat.numel(), up, down=back), name or f"shape {[*tensor.shape]}"
            if strategy in NATIVE:
                exchange.compare_names(name)
            wait_within(exchange.submit(flat, strategy, [piece], name=name), None)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


@contextmanager
def closing_on_failure(group: dist.ProcessGroup) -> Iterator[None]:
    """On a failure inside, close all connections of this rank's earlier calls and tell the other
    ranks, wherever they wait; the next call connects anew."""
    try:
        yield
    except BaseException as error:
        exchanges = _EXCHANGES.pop(group, None)
        if exchanges is None:
            with coordinators.failures_told(group):
                raise
        coordinator = exchanges.coordinator
        named = coordinator.named(error, "all_reduce") if isinstance(error, Exception) else error
        coordinator.fail(named)
        exchanges.close()
        raise named from error.__cause__


def group_exchanges(group: dist.ProcessGroup, options: Options) -> GroupExchanges:
    """The group's exchanges, which the first call makes."""
    if group not in _EXCHANGES:
        _EXCHANGES[group] = GroupExchanges(group, options.timeout)
    return _EXCHANGES[group]


class GroupExchanges:
    """A group's exchanges, kept between calls: one for each topology, seed, device and memory."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.coordinator = coordinators.coordinator(group, timeout)
        self.exchanges: dict[_Kind, Exchange] = {}
        self.close = end_with(group, partial(_close_all, self.exchanges))  # at the latest

    def exchange(
        self, options: Options, placement: Placement = ON_HOST, *, most: int | None = None
    ) -> Exchange:
        """The exchange of earlier calls, or a new one. most: see Exchange."""
        key = str(options.topology), options.seed, placement, most
        if key not in self.exchanges:
            self.coordinator.timeout = options.timeout
            number = len(self.exchanges)
            purpose = f"all_reduce {number}" if number else "all_reduce"
            self.exchanges[key] = Exchange(
                purpose, options, self.coordinator,
                placement=placement, memory=placement.memory(), most=most,
            )  # fmt: skip
        return self.exchanges[key]


def exchanges_of(group: dist.ProcessGroup) -> tuple[Exchange, ...]:
    """The group's exchanges so far."""
    return tuple(_EXCHANGES[group].exchanges.values()) if group in _EXCHANGES else ()


def close_exchanges(group: dist.ProcessGroup) -> None:
    """End the group's exchanges, if it has some."""
    if group in _EXCHANGES:
        _EXCHANGES.pop(group).close()


def _close_all(exchanges: Mapping[_Kind, Exchange]) -> None:
    for each in exchanges.values():
        each.close()


_EXCHANGES: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupExchanges] = (
    weakref.WeakKeyDictionary()
)


def _refuse(tensor: object, options: Options) -> None:
    if options.automatic:
        raise ConfigError('all_reduce needs a compressor by name: "auto" plans for a model')
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"all_reduce averages a tensor, not {tensor!r}")
    if is_sharded(tensor):
        raise ConfigError(
            "all_reduce averages no DTensor: pass tensor.to_local(), and as process_group the "
            "ranks that hold the same shard"
        )
    if tensor.is_sparse or tensor.device.type != "cpu" or tensor.dtype not in COMPRESSIBLE:
        kind = f"{tensor.dtype} {tensor.layout} on {tensor.device}".replace("torch.", "")
        raise ConfigError(
            f"all_reduce averages dense float32, float16 or bfloat16 on the CPU, not {kind}"
        )
