"""The user's options, validated once."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from casync.codec import Codec
from hipress.errors import ConfigError, closest, unknown
from hipress.optim.optimizer_kinds import KINDS, kind_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hipress.policies import Policy

SCOPES = ("tensor", "bucket", "model")
AUTO = "auto"

SMALL = 1024
"""Elements below which a codec without groups leaves a tensor alone (see `Options.min_size`)."""

SCRATCH = 2 << 30
"""Bytes of a GPU's memory that kernels may take besides payloads and states, by default."""

LONGEST = 1e9
"""Seconds, thirty years: clocks of gloo that count nanoseconds overflow from eight times as many,
and then time out at once or never."""


@dataclass(frozen=True)
class Options:
    """Options of `wrap`, `attach` and `Synchronizer` for synchronization.

    All ranks must agree on all but `timeout`.

    Attributes:
        compressor: a spec's name or path, a compiled codec, or "auto": the planner picks a codec
            per tensor, or none.
        strategy: a module of casync.strategies, which sends the payloads; "auto": one that suits
            the codec.
        scope: the unit of compression: a parameter ("tensor"), neighbours in a bucket of
            gradients ("bucket"), or all gradients of the model ("model", for a compressor given by
            name).
        exclude: fnmatch patterns of names of parameters that always travel uncompressed; a
            pattern that matches no parameter is refused.
        min_size: tensors with fewer elements travel uncompressed. None: 0 for codecs that work in
            groups or whose payloads add, and for scopes other than "tensor"; 1024 for others, for
            which a bias is all noise.
        seed: of stochastic codecs. Draws differ between ranks, sides, tensors and steps anyway;
            draws that all ranks share do not depend on it.
        timeout: seconds that hipress waits for another rank, when attached and in a step; finite.
            None (in a call): the process group's. Collectives of DDP itself (bucket rebuild,
            buffers; all of them if nothing is installed) keep the process group's.
        verify: hash every averaged gradient and compare the ranks, every step; and the parameters,
            in the second step and every 100 steps after it, to find a rank that skipped an
            optimizer's step. Slow: for finding faults.
        checksum: send a CRC-32 with every compressed message; a damaged message raises
            SyncError, naming the sending rank, part and step. Refused over NCCL, where no host
            sees messages. Costs 0.25 ms for 1 MB of payload,
            2.5 ms for 10 MB and 27 ms for 50 MB on either side, on a busy machine. Native
            all-reduces, such as those of uncompressed gradients, have no checksum.
        down: the codec of averages, which owners send: a spec's name or path, or a compiled codec,
            with error feedback of its own; None or "none": float32, so that only gradients are
            compressed. "auto": the compressor's own code. For strategies with owners that average.
        topology: the nodes of the group's ranks, for strategies that depend on them: ranks per
            node, or a list of ranks for each node. None: by LOCAL_WORLD_SIZE, which torchrun sets,
            or by equal host names.
        optimizer: the optimizer of the training, a torch.optim.Optimizer or its class's name.
            "auto" then chooses among all codecs that kept the loss under its kind in measurements,
            and a named codec that did not is reported. None: among those that kept it under every
            kind. Here it is the kind, one of hipress.optim.optimizer_kinds.KINDS.
        accept_loss: the share by which the loss may end above float32's, such as 0.01: "auto" then
            also takes codecs that lose, or that have rounds or states of their own (powersgd, dgc),
            if all measurements under this kind of optimizer are within it. Such a state starts at
            zero again when a trial changes plans. Needs `optimizer`.
        rules: other compressors for some parameters, by fnmatch patterns of names, or of names and
            shapes, as in `"*.weight 1000x*"`; the first match counts, and a rule that gets no
            parameter is refused. A mapping such as `{"*embed*": "int8_group", "*.bias": None}`, or
            the path of a YAML file with one; a value is a name, a path, a compiled codec, None
            (uncompressed) or a mapping of `compressor` and its parameters.
        policy: changes of the compression during training, with a compressor of its own: a
            hipress.GraVAC, Accordion or Warmup, or another hipress.policies.Policy.
        transport: the transport of payloads. "auto": "gloo" for a model on the CPU, and "nccl" for
            a model on a GPU with an NCCL process group. "staged": a GPU's payloads over gloo,
            through pinned memory. "host": gradients are copied to the host and compressed by the
            CPU. "nccl" uses torch.distributed; "nccl4py" and "pynccl" use these packages. The
            compressor "auto" tries the CPU beside the GPU with every transport, and with "host"
            only the CPU.
        capture: launch a bucket's synchronization as a CUDA graph; over NCCL, and only if no
            lengths vary and no parameter depends on the step. "auto": if steps take less time so,
            by a trial in the first steps; not with a policy, nor by a `Synchronizer`. True: from
            the third step on, for many small tensors, whose launches cost more than their kernels:
            graphs run one after another. False: never.
        scratch: most bytes of a GPU's memory that the kernels of a codec may need for a tensor,
            besides payloads and states; a tensor that would need more travels uncompressed. Codecs
            that work in groups need none, "topk" 4 bytes an element of the largest tensor,
            "powersgd" 8, "dgc" 12 and "thc" 40.
        params: parameters of the codec, as its spec names them.
    """

    compressor: str | Codec = AUTO
    strategy: str = AUTO
    scope: str = "tensor"
    exclude: tuple[str, ...] = ()
    min_size: int | None = None
    seed: int = 0
    timeout: float = default_pg_timeout.total_seconds()
    verify: bool = False
    checksum: bool = False
    down: str | Codec | None = AUTO
    topology: int | tuple[tuple[int, ...], ...] | None = None
    optimizer: str | None = None
    accept_loss: float | None = None
    rules: Mapping[str, Any] | str | os.PathLike[str] = field(default_factory=dict)
    policy: Policy | None = None
    transport: str = AUTO
    capture: bool | str = AUTO
    scratch: int = SCRATCH
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_types()
        if self.scope not in SCOPES:
            raise unknown("scope", self.scope, SCOPES)
        if self.scope == "model" and self.automatic:
            raise ConfigError(
                'scope="model" needs a compressor: "auto" chooses one for each tensor apart'
            )
        if not 0 < self.timeout <= LONGEST:  # NaN, too
            raise ConfigError(
                f"timeout must be a finite positive number of seconds, at most {LONGEST:g}, "
                f"got {self.timeout}"
            )
        if self.min_size is not None and self.min_size < 0:
            raise ConfigError(f"min_size must be None or at least 0, got {self.min_size}")
        if self.optimizer not in (None, *KINDS):
            raise unknown("kind of optimizer", str(self.optimizer), KINDS)
        if self.accept_loss is not None:
            self._check_loss(self.accept_loss)
        if self.scratch < 0:
            raise ConfigError(f"scratch must be at least 0 bytes, got {self.scratch}")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be in 0 .. 2**64-1, got {self.seed}")
        if self.params and (self.automatic or not isinstance(self.compressor, str)):
            self._refuse_params()

    def _check_loss(self, accepted: float) -> None:
        if not 0 < accepted < 1:  # NaN, too
            raise ConfigError(
                f"accept_loss is a share of the loss between 0 and 1, such as 0.01, not {accepted}"
            )
        if not self.automatic:
            raise ConfigError(
                'accept_loss says what "auto" may choose: leave it out with a compressor of your '
                "own, or leave the compressor out"
            )
        if self.optimizer is None:
            raise ConfigError(
                "accept_loss goes by what was measured under a kind of optimizer, and none is "
                "known here: pass optimizer=, of torch.optim or hipress.optim"
            )

    def _refuse_params(self) -> NoReturn:
        for name in self.params:
            if elsewhere(name):
                raise ConfigError(elsewhere(name))
        misspelt = next((name for name in self.params if closest(name, names())), None)
        if misspelt is not None:
            raise unknown("option", misspelt, names())
        raise ConfigError(
            f"codec parameters {sorted(self.params)} need a compressor given by name; "
            'with "auto" or a compiled codec there is nothing they could configure'
        )

    def _check_types(self) -> None:
        if not isinstance(self.compressor, str):
            _check_codec("compressor", self.compressor)
        if not isinstance(self.down, str | None):
            _check_codec("down", self.down)
        if self.automatic and self.down != AUTO:
            raise ConfigError('down needs a compressor that is named: "auto" chooses for itself')
        if self.policy is not None:
            self._check_policy()
        _check_topology(self.topology)
        for name, kinds, wanted in (
            ("strategy", str, "a name"),
            ("scope", str, "a name"),
            ("transport", str, "a name"),
            ("min_size", int | None, "a whole number, or None"),
            ("seed", int, "a whole number"),
            ("timeout", int | float, "seconds, or a timedelta"),
            ("verify", bool, "True or False"),
            ("checksum", bool, "True or False"),
            ("scratch", int, "a whole number of bytes"),
            ("accept_loss", int | float | None, "a share of the loss, or None"),
        ):
            value = getattr(self, name)
            truth = isinstance(value, bool) and kinds is not bool  # a bool is an int to Python
            if truth or not isinstance(value, kinds):
                raise ConfigError(f"{name} is {wanted}, not {value!r}")
        if not isinstance(self.capture, bool) and self.capture != AUTO:
            raise ConfigError(f'capture is True, False or "auto", not {self.capture!r}')
        if not all(isinstance(pattern, str) for pattern in self.exclude):
            raise ConfigError(f"exclude must hold patterns of parameter names, got {self.exclude}")

    def _check_policy(self) -> None:
        """Raise ConfigError for an object that is no policy, or an option that excludes one."""
        policy: object = self.policy
        if isinstance(policy, type) or not callable(getattr(policy, "new_state", None)):
            raise ConfigError(
                f'policy is one such as hipress.GraVAC("topk", ratios=(0.1, 0.01)), not {policy!r}'
            )
        if not self._unnamed:
            raise ConfigError("a policy has a compressor of its own: leave compressor out")
        if self.down != AUTO:
            raise ConfigError("down goes with a compressor that is named, not with a policy")
        if self.params:
            raise ConfigError(
                f"codec parameters {sorted(self.params)} belong in the policy's levels"
            )

    @property
    def automatic(self) -> bool:
        """True if the planner chooses the codec."""
        return self._unnamed and self.policy is None

    @property
    def _unnamed(self) -> bool:
        return isinstance(self.compressor, str) and self.compressor == AUTO


def _check_topology(topology: object) -> None:
    if isinstance(topology, tuple):
        good = bool(topology) and all(_are_ranks(node) for node in topology)
    else:
        good = topology is None or (_are_ranks((topology,)) and topology != 0)
    if not good:
        raise ConfigError(
            "topology is the number of ranks per node, or a list of ranks for each node, such as "
            f"[[0, 1], [2, 3]], not {topology!r}"
        )


def _are_ranks(node: object) -> bool:
    return isinstance(node, tuple) and all(type(n) is int and n >= 0 for n in node)


def _check_codec(option: str, codec: object) -> None:
    """Raise ConfigError for an object that lacks a member of casync.codec.Codec."""
    if not callable(getattr(codec, "encode_batch", None)):
        raise ConfigError(f"{option} must be a name, a path or a codec, got {codec!r}")
    if isinstance(codec, type):
        raise ConfigError(f"{option} is the class {codec.__name__}; pass a codec made of it")
    members = [name for name in vars(Codec) if not name.startswith("_")]
    absent = [name for name in members if not hasattr(codec, name)]
    if absent:
        raise ConfigError(
            f"{option} {type(codec).__name__} lacks {', '.join(absent)}: a codec has all "
            "members of casync.codec.Codec (casync.codec.CodecDefaults has some to inherit)"
        )


def names() -> list[str]:
    """Names of the options of `wrap` besides a compressor and its parameters."""
    own = [each.name for each in fields(Options) if each.name not in ("compressor", "params")]
    return [*own, "process_group", "ddp_kwargs"]


def refuse_foreign(
    caller: str, params: Iterable[str], why: str, others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ConfigError for an option of `wrap` that `caller` took for a parameter of the codec.

    why: reason; others: those of some options, by name.
    """
    for name in params:
        if name in names():
            raise ConfigError(f"hipress.{caller} takes no {name}: {others.get(name, why)}")


def elsewhere(name: str) -> str:
    """Advice for an argument of DistributedDataParallel, or of an optimizer that averages momentum,
    given as an option; else ""."""
    if name in ("freeze", "max_norm", "rank_norm", "scaler"):
        return (
            f"{name!r} is an argument of the optimizers of hipress.optim: make one in place of "
            f"torch's, such as hipress.optim.AdamW(model.parameters(), {name}=...), and pass it as "
            "optimizer="
        )
    known = inspect.signature(DistributedDataParallel).parameters
    if name not in known or name in ("module", "process_group"):
        return ""
    return (
        f"{name!r} is an argument of DistributedDataParallel; hipress.wrap takes these as "
        f"ddp_kwargs={{{name!r}: ...}}"
    )


def make(
    compressor: str | os.PathLike[str] | Codec,
    *,
    exclude: str | Iterable[str] = (),
    min_size: SupportsIndex | None = None,
    seed: SupportsIndex = 0,
    scratch: SupportsIndex = SCRATCH,
    timeout: float | timedelta | None = None,
    down: str | os.PathLike[str] | Codec | None = AUTO,
    topology: SupportsIndex | Iterable[Iterable[SupportsIndex]] | None = None,
    optimizer: Optimizer | str | None = None,
    params: Mapping[str, Any] | None = None,
    **rest: Any,
) -> Options:
    """Options from a caller's values: paths of any kind, one pattern or several, whole numbers of
    any kind, seconds or a timedelta, an optimizer or its name, parameters of Python or NumPy.
    Raises ConfigError."""
    if not isinstance(exclude, Iterable):
        raise ConfigError(
            f"exclude={exclude!r}: pass a pattern of parameter names, such as 'head.*', "
            "or a list of them"
        )
    return Options(
        _path(compressor),
        exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        min_size=_whole(min_size),
        seed=_whole(seed),
        scratch=_whole(scratch),
        timeout=_seconds(timeout),
        down=_path(down),
        topology=_nodes(topology),
        optimizer=kind_of(optimizer),
        params={name: _plain(value) for name, value in (params or {}).items()},
        **rest,
    )


def _path(codec: Any) -> Any:
    return os.fspath(codec) if isinstance(codec, os.PathLike) else codec


def _nodes(topology: Any) -> Any:
    """Lists of any kind as tuples; other values unchanged, for Options to refuse."""
    try:
        return tuple(tuple(_whole(rank) for rank in node) for node in topology)
    except TypeError:
        return _whole(topology)


def _whole(value: Any) -> Any:
    """A whole number as Python's int, for JSON and the comparison of ranks; other values unchanged,
    for Options to refuse."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _seconds(timeout: float | timedelta | None) -> Any:
    if timeout is None:
        timeout = default_pg_timeout
    return timeout.total_seconds() if isinstance(timeout, timedelta) else _whole(timeout)


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's, so that equal parameters look equal on all ranks."""
    from compll.runtime.library import plain  # not above: compll is large

    return plain(value)
