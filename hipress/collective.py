"""all_reduce: one tensor, compressed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist

from casync.building.parts import Choice
from casync.graph.graph import Program
from casync.rounds import refuse_workers
from hipress import options as options_
from hipress.arguments import group_of
from hipress.coordination import coordinator as coordinators
from hipress.coordination import nodes
from hipress.coordination.coordinator import Coordinator
from hipress.coordination.link import group_timeout
from hipress.errors import ConfigError
from hipress.model import COMPRESSIBLE
from hipress.modes import ordinary
from hipress.options import AUTO, Options
from hipress.plan.codecs import described, resolve, resolve_down, strategy_for
from hipress.plan.plan import partitions
from hipress.shards import is_sharded
from hipress.sync.buckets import program_of_one
from hipress.sync.executors import start_executor
from hipress.sync.futures import wait_within

if TYPE_CHECKING:
    from casync.codec import Codec

_Key = tuple[tuple[str, ...], str, int, str]


@ordinary()
def all_reduce(
    tensor: torch.Tensor,
    compressor: str | os.PathLike[str] | Codec,
    *,
    strategy: str = AUTO,
    down: str | os.PathLike[str] | Codec | None = AUTO,
    topology: SupportsIndex | Iterable[Iterable[SupportsIndex]] | None = None,
    seed: SupportsIndex = 0,
    timeout: float | timedelta | None = None,
    process_group: dist.ProcessGroup | None = None,
    **params: Any,
) -> torch.Tensor:
    """Average `tensor` over the ranks, compressed, in place; the same bits on every rank.

    tensor: on the CPU, of float32, float16 or bfloat16, of any shape; it is compressed as a whole.
    `compressor`, `strategy`, `down`, `topology`, `seed`, `timeout` and `params` as for `wrap`, but
    compressor "auto" is not allowed. Every rank of `process_group` (all ranks, by default) must
    call this, with the same arguments.

    No residual is kept: values that the codec leaves out are lost, as in the first step of a
    training. Stochastic codecs draw anew in each call, by `seed` and the number of earlier calls.
    The first call with a codec connects the ranks, and the first one of a length plans; later ones
    only send. With one rank, nothing happens.

    Raises ConfigError, ConfigMismatch and AgreementTimeout as `wrap`; for a failure on the way
    RankLost, AgreementTimeout or SyncError, which names rank, peer and task.
    """
    group = group_of(process_group)
    with _ending(group):
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
            if group not in _JOINED:
                _JOINED[group] = _Joined(group, options.timeout)
            codecs = {"codec": codec} if other is None else {"codec": codec, "down": other}
            _JOINED[group].reducer(codecs, strategy, options).run(tensor)
    return tensor


@contextmanager
def _ending(group: dist.ProcessGroup) -> Iterator[None]:
    """On a failure inside, close all connections of this rank's earlier calls and tell the other
    ranks, wherever they wait; the next call connects anew."""
    try:
        yield
    except BaseException as error:
        joined = _JOINED.pop(group, None)
        if joined is None:
            with coordinators.failures_told(group):
                raise
        coordinator = joined.coordinator
        named = coordinator.named(error, "all_reduce") if isinstance(error, Exception) else error
        coordinator.fail(named)
        joined.close()
        raise named from error.__cause__


class _Joined:
    """Connections of a group's ranks, kept between calls."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.coordinator = coordinators.coordinator(group, timeout)
        self._reducers: dict[_Key, _Reducer] = {}
        self.close = weakref.finalize(group, _close_all, self._reducers)  # at the latest

    def reducer(self, codecs: Mapping[str, Codec], strategy: str, options: Options) -> _Reducer:
        """The reducer of earlier calls, or a new one. codecs: "codec", and perhaps "down"."""
        digests = tuple(each.digest for each in codecs.values())
        key = digests, strategy, options.seed, str(options.topology)
        if key not in self._reducers:
            self.coordinator.timeout = options.timeout
            purpose = f"all_reduce {len(self._reducers)}"
            made = _Reducer(codecs, strategy, options, self.coordinator, purpose)
            self._reducers[key] = made
        return self._reducers[key]


def _close_all(reducers: Mapping[_Key, _Reducer]) -> None:
    for each in reducers.values():
        each.close()


class _Reducer:
    """Averages tensors of any length with one codec and strategy."""

    def __init__(
        self,
        codecs: Mapping[str, Codec],
        strategy: str,
        options: Options,
        coordinator: Coordinator,
        purpose: str,
    ) -> None:
        self._codecs, self._strategy, self._coordinator = codecs, strategy, coordinator
        told = [[described(each), each.digest] for each in codecs.values()]
        facts = {"codec": [*told, strategy, options.seed], "topology": str(options.topology)}
        places = self._settle(facts, nodes.place())
        self._topology = nodes.topology_of(options.topology, places, coordinator.ranks)
        self._executor = start_executor(purpose, codecs, options, coordinator, {})
        self._programs: dict[tuple[int, torch.dtype], Program] = {}
        self._calls = 0

    def run(self, tensor: torch.Tensor) -> None:
        """Average a tensor in place."""
        flat = tensor.detach().resolve_neg().contiguous().view(-1)
        program = self._program(flat.numel(), flat.dtype)
        wait_within(self._executor.submit(program, flat, {}, self._calls), None)
        self._calls += 1
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def close(self) -> None:
        """End the threads."""
        self._executor.close()

    def _program(self, numel: int, dtype: torch.dtype) -> Program:
        if (numel, dtype) not in self._programs:
            self._settle({"elements": numel, "type": str(dtype)})
            codecs, topology = self._codecs, self._topology
            cut = partitions(numel, codecs["codec"], self._strategy, topology.world_size)
            choice = Choice("codec", self._strategy, cut, "down" if "down" in codecs else None)
            rank, rotates = self._coordinator.rank, self._executor.rotates
            self._programs[numel, dtype] = program_of_one(
                numel, choice, topology, codecs, rank, rotates=rotates
            )
        return self._programs[numel, dtype]

    def _settle(self, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
        return self._coordinator.require_equal(
            {f"{w} of all_reduce": fact for w, fact in facts.items()}, own
        )


_JOINED: weakref.WeakKeyDictionary[dist.ProcessGroup, _Joined] = weakref.WeakKeyDictionary()


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
