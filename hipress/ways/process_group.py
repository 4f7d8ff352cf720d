"""The process group `hipress`.

[Note: no states] torch.distributed gives an all-reduce no name, and the order of all-reduces in a
backward pass tells none: checkpoints run passes within passes, blocks are skipped, models share a
group. A residual could go to another layer's gradient, so codecs with states are refused.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from casync.codec import Codec
from casync.rounds import refuse_workers
from hipress import compat
from hipress import options as options_
from hipress.channel.exchange import Exchange, Piece
from hipress.channel.futures import wait_within
from hipress.channel.records import GROUP, check_record, make_record
from hipress.codecs import full_name, resolve, resolve_down, strategy_for
from hipress.errors import ConfigError, StateError
from hipress.model.devices import place
from hipress.model.params import COMPRESSIBLE
from hipress.options import AUTO, refuse_foreign
from hipress.reporting.group_report import Calls, GroupReport
from hipress.ways.all_reduce import (
    channels_of,
    close_channels,
    closing_on_failure,
    group_channels,
)

__all__ = ["COMPRESSOR", "MIN_SIZE", "NAME", "CompressingGroup", "GroupOptions", "register"]

COMPRESSOR = "int4_group"  # unbiased, without a residual
MIN_SIZE = 1 << 14  # elements


class GroupOptions:
    """The compressor of a mesh dimension's all-reduces, and how its payloads travel.

    ::

        mesh = init_device_mesh(
            "cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"),
            backend_override={"replicate": ("hipress", hipress.GroupOptions("int4_group"))},
        )
        fully_shard(model, mesh=mesh)  # or replicate(model, mesh=mesh["replicate"])
    """

    def __init__(
        self,
        compressor: str | os.PathLike[str] | Codec = COMPRESSOR,
        *,
        min_size: SupportsIndex = MIN_SIZE,
        strategy: str = AUTO,
        down: str | os.PathLike[str] | Codec | None = AUTO,
        topology: SupportsIndex | Iterable[Iterable[SupportsIndex]] | None = None,
        seed: SupportsIndex = 0,
        timeout: float | timedelta | None = None,
        transport: str = AUTO,
        **params: Any,
    ) -> None:
        """Arguments as for `wrap`; "none" leaves everything to the inner group.

        compressor, down: without states, since torch.distributed gives an all-reduce no name by
        which a residual could find the gradient that it belongs to.
        min_size: smaller tensors, of fewer elements, stay uncompressed. timeout: also of the inner
        group; by default torch's. Raises ConfigError.
        """
        refuse_foreign(
            "GroupOptions", params, "it belongs to a model, and a group knows none",
            {"checksum": "over NCCL no host sees the messages"},
        )  # fmt: skip
        self.settings = options_.make(
            compressor, min_size=min_size, strategy=strategy, down=down, topology=topology,
            seed=seed, timeout=timeout, transport=transport, params=params,
        )  # fmt: skip
        if self.settings.automatic:
            raise ConfigError('a group needs a compressor by name: "auto" plans for a model')
        if transport == "host":
            raise ConfigError('a group compresses where its tensors are: no transport="host"')
        codec = resolve(self.settings)
        other = resolve_down(self.settings, codec)
        for each in filter(None, (codec, other)):
            _refuse_states(each)
        strategy_for(codec, strategy, other)
        #: read by init_device_mesh, which passes it on
        self._timeout = None if timeout is None else timedelta(seconds=self.settings.timeout)


def _refuse_states(codec: Codec) -> None:
    """Raise ConfigError for a codec that keeps something from step to step."""
    if codec.states:
        names = ", ".join(state.name for state in codec.states)
        raise ConfigError(
            f"compressor {codec.name!r} keeps states ({names}) from step to step, and a process "
            "group cannot tell whose gradient it averages: use one without states, such as "
            f"{COMPRESSOR!r} or 'int8_group', or hipress.shard(model, replicas={codec.name!r})"
        )


NAME = "hipress"
SUM, AVG = dist.ReduceOp(dist.ReduceOp.SUM), dist.ReduceOp(dist.ReduceOp.AVG)
#: collectives that the inner group does as they are, by the names of several versions of torch
NATIVE = (
    *("broadcast", "reduce", "barrier", "monitored_barrier", "send", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "allreduce_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "gather", "scatter"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)


class CompressingGroup(dist.ProcessGroup):
    """A group that compresses large all-reduces of a backward pass, and has an inner group of gloo
    and NCCL for everything else."""

    def __init__(self, request: Any, options: GroupOptions) -> None:
        """request: torch's DistributedBackendOptions. All ranks of the group must make it."""
        super().__init__(request.group_rank, request.group_size)  # type: ignore[call-arg]
        self.options, self._inner = options, _make_inner(request)
        self._name, self._description = str(request.group_id), ""
        self._averaged = 0  # compressed all-reduces so far; stochastic codecs draw by it
        self._backward: int | None = None  # the latest backward pass with compressed all-reduces
        self._passes = 0  # of these
        self._failed = False
        self._agreed = False  # True once ranks have compared their options
        self._compiled: dict[str, tuple[Codec, Codec | None]] = {}
        self.calls: Counter[tuple[str, str]] = Counter()  # by what, and why it is not compressed
        self.elements: Counter[tuple[str, str]] = Counter()

    def allreduce(  # type: ignore[override] # of several forms, one of which is compressed
        self, tensors: Any, opts: Any = None, *rest: Any, **named: Any
    ) -> dist.Work:
        """Average or add up tensors in place. A compressed call returns when the result is there,
        on a GPU in the order of the current stream. Raises the errors of hipress.all_reduce."""
        why = self._why_not(tensors, opts)
        self._count("all-reduce", tensors, why)
        if why:
            return self._inner.allreduce(tensors, opts, *rest, **named)
        (tensor,) = tensors
        if (number := compat.backward_id()) != self._backward:
            self._backward, self._passes = number, self._passes + 1
            compat.call_after_backward(self._settle)
        with self._failing():
            flat = tensor.detach().contiguous().view(-1)
            wait_within(self._average(flat), None)
            if opts.reduceOp == SUM:
                flat.mul_(self.size())
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))
        return compat.finished_work(tensors)

    def _settle(self) -> None:
        """Wait until a device has done all work, and raise its errors: no optimizer may step before
        they are known."""
        with self._failing():
            for each in channels_of(self):
                each.settle()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A context of an all-reduce, after whose failure ranks' states may differ."""
        try:
            with closing_on_failure(self):
                yield
        except BaseException:
            self._failed = True
            raise

    def state_dict(self, *, portable: bool = False) -> dict[str, Any]:
        """The number by which stochastic codecs draw; the same on all ranks, for any number."""
        self._refuse_unfinished()
        return make_record(GROUP, self._averaged, portable=True)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a state: see `hipress.load_state_dict`."""
        self._refuse_unfinished()
        coordinator = group_channels(self, self.options.settings).coordinator
        with coordinator.failures_told():
            check_record(state, GROUP)
        coordinator.require_equal({"all-reduces of the state to load": state["counter"]})
        self._averaged = state["counter"]

    def detach(self) -> None:
        """Raises ConfigError: a group ends by destroy_process_group."""
        raise ConfigError("a process group hipress ends by torch.distributed.destroy_process_group")

    def _refuse_unfinished(self) -> None:
        if self._failed or compat.backward_id() is not None:
            why = "an all-reduce failed" if self._failed else "a backward pass is under way"
            raise StateError(
                f"rank {self.rank()} of a process group hipress: {why}: states are saved and "
                "loaded between two steps. After a failure make the group anew, and load the state "
                "that was saved last"
            )

    def report(self) -> GroupReport:
        """Collectives so far, and the bytes of the compressed ones."""
        counters = [each.counters for each in channels_of(self)]
        rows = [
            Calls(what, why, self.calls[what, why], self.elements[what, why])
            for what, why in self.calls
        ]
        return GroupReport(
            rank=self.rank(),
            world_size=self.size(),
            compressor=full_name(resolve(self.options.settings)),
            calls=tuple(rows),
            bytes_sent=round(sum(each.wire_bytes for each in counters)),
            passes=self._passes,
        )

    def _why_not(self, tensors: Any, opts: Any) -> str:
        """The reason why an all-reduce is not compressed; "" if it is."""
        if not isinstance(opts, dist.AllreduceOptions) or len(tensors) != 1:
            return "several tensors, or a form that torch.distributed.all_reduce does not use"
        if opts.reduceOp not in (SUM, AVG):
            return "neither SUM nor AVG"
        tensor, settings = tensors[0], self.options.settings
        if tensor.is_sparse or tensor.dtype not in COMPRESSIBLE:
            kind = "sparse" if tensor.is_sparse else f"{tensor.dtype}".removeprefix("torch.")
            return f"{kind}, not dense float32, float16 or bfloat16"
        if compat.backward_id() is None:  # norms, metrics, weights: nothing that may lose bits
            return "outside of a backward pass"
        if settings.compressor == "none" or self.size() == 1:
            return "one rank" if self.size() == 1 else "compressor 'none'"
        if tensor.numel() < (settings.min_size or 0):
            return f"fewer than {settings.min_size} elements"
        return ""

    def _average(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start the compressed average of a flat tensor, in place."""
        settings = self.options.settings
        placement = place([("the gradient", flat.device)], settings.transport, self._backends)
        codec, down = self._codecs(placement.target)
        channels = group_channels(self, settings)
        if not self._agreed:
            channels.coordinator.require_equal({"min_size of group hipress": settings.min_size})
            self._agreed = True
        channel = channels.channel(settings, placement)
        up, back = channel.add(codec), None if down is None else channel.add(down)
        strategy, length = strategy_for(codec, settings.strategy, down), flat.numel()
        draw, self._averaged = self._averaged, self._averaged + 1
        name = f"all-reduce {draw} of {length}"
        exchange = Exchange(name, (Piece(length, up, strategy, back),))
        return channel.submit(flat, exchange, draw=draw)

    def _codecs(self, target: str) -> tuple[Codec, Codec | None]:
        """The codec of workers, and that of owners if it is another."""
        if target not in self._compiled:
            settings = self.options.settings
            codec = resolve(settings, target)
            if refusal := refuse_workers(codec, self.size()):
                raise ConfigError(refusal)
            self._compiled[target] = codec, resolve_down(settings, codec, target)
        return self._compiled[target]

    @property
    def _backends(self) -> dict[str, str]:
        return {"cpu": "gloo", **({"cuda": "nccl"} if torch.cuda.is_available() else {})}

    def _count(self, what: str, tensors: Any, why: str) -> None:
        self.calls[what, why] += 1
        self.elements[what, why] += _elements(tensors)

    # The rest is what torch.distributed asks of a group, besides the collectives of NATIVE.

    def getBackendName(self) -> str:
        """Implements ProcessGroup.getBackendName."""
        return NAME

    def name(self) -> str:
        """Implements ProcessGroup.name."""
        return NAME

    @property
    def group_name(self) -> Any:
        """Implements ProcessGroup.group_name."""
        return self._name

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """Implements ProcessGroup.group_desc."""
        return self._description

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def shutdown(self) -> None:
        """End connections, as destroy_process_group does."""
        close_channels(self)
        self._inner.shutdown()

    def abort(self) -> None:
        """End connections, whatever is under way."""
        close_channels(self)
        self._inner.abort()


def _native(name: str) -> Any:
    """A method that hands a collective to the inner group."""

    @functools.wraps(getattr(dist.ProcessGroup, name))
    def call(self: CompressingGroup, *args: Any, **named: Any) -> Any:
        self._count(name.strip("_"), args[0] if args else (), "only all-reduces are compressed")
        return getattr(self._inner, name)(*args, **named)

    return call


for _each in NATIVE:
    if hasattr(dist.ProcessGroup, _each):
        setattr(CompressingGroup, _each, _native(_each))


def _elements(tensors: object) -> int:
    """Elements of tensors in lists of any depth."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel()
    return sum(map(_elements, tensors)) if isinstance(tensors, list | tuple) else 0


def _make_inner(request: Any) -> dist.ProcessGroup:
    """A group of gloo, and of NCCL where there are GPUs, as torch.distributed makes it."""
    rank, size = request.group_rank, request.group_size
    store, delay = request.store, request.timeout
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(store, rank, size)
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    group._set_default_backend(kinds.NCCL if gpus else kinds.GLOO)
    gloo = dist.ProcessGroupGloo(compat.PrefixStore("gloo", store), rank, size, delay)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if gpus:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = delay
        nccl = dist.ProcessGroupNCCL(compat.PrefixStore("nccl", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group


def _make(request: Any, options: Any) -> dist.ProcessGroup:
    """A group for torch.distributed, which calls this. Raises ConfigError."""
    if not request.global_ranks_in_group:
        raise ConfigError(
            "hipress cannot be the backend of all ranks: losses, norms and checkpoints travel "
            'there, which must arrive as they are. Use init_process_group("gloo") or "nccl", and '
            "hipress for a dimension of a mesh: init_device_mesh(..., "
            'backend_override={"replicate": "hipress"})'
        )
    if options is not None and not isinstance(options, GroupOptions):
        raise ConfigError(f"options of a group hipress are hipress.GroupOptions, not {options!r}")
    return CompressingGroup(request, options or GroupOptions())


def register() -> None:
    """Make the backend "hipress" known to torch.distributed: its entry point from torch 2.14 on,
    before that called by `import hipress`."""
    if NAME not in dist.Backend.backend_list:
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=devices)
