"""all_reduce: one tensor, compressed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, SupportsIndex, TypeAlias

import torch
import torch.distributed as dist

from casync.codec import Codec
from casync.rounds import refuse_workers
from hipress import options as options_
from hipress import registry
from hipress.arguments import group_of
from hipress.channel.channel import Channel
from hipress.channel.exchange import Exchange, Piece
from hipress.channel.failures import Failures
from hipress.channel.futures import wait_within
from hipress.codecs import resolve, resolve_down, strategy_for
from hipress.errors import ConfigError
from hipress.model.devices import ON_HOST, Placement
from hipress.model.params import COMPRESSIBLE
from hipress.model.shards import is_sharded
from hipress.model.torch_modes import without_inference_mode
from hipress.options import AUTO, Options
from hipress.ranks import coordinator as coordinators
from hipress.ranks.groups import group_timeout

NATIVE = ("allreduce", "hierarchical")  # strategies with native sums
ROOM = 256 << 20  # bytes of the tensors whose programs are kept
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
            channels = group_channels(group, options)
            channel = channels.channel(options, most=ROOM)
            up, back = channel.add(codec), None if other is None else channel.add(other)
            flat = tensor.detach().resolve_neg().contiguous().view(-1)
            name = name or f"shape {[*tensor.shape]}"
            if strategy in NATIVE:
                channel.compare_names(name, options.timeout)
            exchange = Exchange(name, (Piece(flat.numel(), up, strategy, back),))
            draw, seconds = channels.draw(channel), options.timeout
            wait_within(channel.submit(flat, exchange, draw=draw, timeout=seconds), None)
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
        channels = registry.get(group, GroupChannels)
        if channels is None:
            with coordinators.failures_told(group):
                raise
        registry.drop(group)
        named = channels.failures.fail(error, max(0, channels.calls - 1))
        channels.close()
        raise named from error.__cause__


def group_channels(group: dist.ProcessGroup, options: Options) -> GroupChannels:
    """The group's channels, which the first call makes."""
    channels = registry.get(group, GroupChannels)
    if channels is None:
        channels = GroupChannels(group, options.timeout)
        registry.put(group, channels)
    return channels


class GroupChannels:
    """A group's channels, kept between calls: one for each topology, seed, device and memory."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.coordinator = coordinators.coordinator(group, timeout)
        self.failures = Failures(self.coordinator, timeout, "all_reduce")
        self.channels: dict[_Kind, Channel] = {}
        self.calls = 0  # so far, for errors
        self._draws: Counter[Channel] = Counter()

    def channel(
        self, options: Options, placement: Placement = ON_HOST, *, most: int | None = None
    ) -> Channel:
        """The channel of a call: that of earlier ones, or a new one. most: see Channel."""
        key = str(options.topology), options.seed, placement, most
        self.coordinator.timeout = options.timeout
        self.calls += 1
        if key not in self.channels:
            number = len(self.channels)
            purpose = f"all_reduce {number}" if number else "all_reduce"
            self.channels[key] = Channel(
                purpose, options, self.coordinator, placement=placement, most=most,
                failures=self.failures,
            )  # fmt: skip
        return self.channels[key]

    def draw(self, channel: Channel) -> int:
        """The number of earlier calls, by which stochastic codecs draw."""
        self._draws[channel] += 1
        return self._draws[channel] - 1

    def close(self) -> None:
        """End threads and connections: of a collected group, channels do so themselves."""
        for each in self.channels.values():
            each.close()


def channels_of(group: dist.ProcessGroup) -> tuple[Channel, ...]:
    """The group's channels so far."""
    channels = registry.get(group, GroupChannels)
    return () if channels is None else tuple(channels.channels.values())


def close_channels(group: dist.ProcessGroup) -> None:
    """End the group's channels, if it has some."""
    channels = registry.get(group, GroupChannels)
    registry.drop(group)
    if channels is not None:
        channels.close()


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
