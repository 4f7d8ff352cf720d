"""The user's options, validated once."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
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


#: ways in besides wrap, attach and Synchronizer, which take all options
GOSSIP, SHARD, OUTER, ALL_REDUCE, GROUP = "Gossip", "shard", "Outer", "all_reduce", "GroupOptions"


@dataclass(frozen=True)
class Option:
    """The declaration of an option."""

    words: str  # its effect, in Markdown, for docs/use/wrap.md
    ways: tuple[str, ...]  # other ways in that take it
    kinds: Any  # types of its values; None: a check of its own
    wanted: str  # words for these


def _option(
    words: str, ways: tuple[str, ...] = (), *, kinds: Any = None, wanted: str = ""
) -> Mapping[str, Option]:
    """Metadata of a field of Options: see Option."""
    return {"option": Option(words, ways, kinds, wanted)}


@dataclass(frozen=True)
class Options:
    """Options of `wrap`, `attach` and `Synchronizer`, of which other ways in take some.

    Each field declares its words, its types, and the ways in that take it; docs/use/wrap.md has the
    table. All ranks must agree on all but `timeout`. `optimizer` is here the kind of one, of
    hipress.optim.optimizer_kinds.KINDS.
    """

    compressor: str | Codec = field(
        default=AUTO,
        metadata=_option(
            '`"auto"` (the default): one for all tensors that it suits, [by a trial]'
            "(#how-does-auto-choose), or none; a name from `compll list`, a path, or a compiled "
            "codec: [which?](choose.md)",
            (GOSSIP, OUTER, ALL_REDUCE, GROUP),
        ),
    )
    strategy: str = field(
        default=AUTO,
        metadata=_option(
            'how payloads travel: `"auto"` takes what suits the compressor; else one of those '
            "below",
            (OUTER, ALL_REDUCE, GROUP),
            kinds=str,
            wanted="a name",
        ),
    )
    optimizer: str | None = field(
        default=None,
        metadata=_option(
            'the model\'s optimizer, or its name (`"sgd"`, `"adamw"`). `"auto"` then chooses '
            "among all compressors that [kept the loss](../measurements/losses.md) under its "
            "kind, else among those that kept it under every kind. A named compressor that "
            "raised the loss under this kind is a warning",
            (OUTER,),
        ),
    )
    accept_loss: float | None = field(
        default=None,
        metadata=_option(
            'the share by which the loss may end above float32\'s, such as `0.01`: `"auto"` then '
            "also takes compressors whose [measured "
            "loss](../measurements/losses.md#a-loss-that-you-accept) is within it, with states "
            "of their own, too, which begin at zero when a trial changes plans. Needs "
            "`optimizer`",
            kinds=int | float | None,
            wanted="a share of the loss, or None",
        ),
    )
    scope: str = field(
        default="tensor",
        metadata=_option(
            '`"tensor"`: each parameter is compressed by itself, small ones travel together; '
            '`"bucket"`: neighbours in a bucket as one tensor; `"model"`: all as one tensor, by '
            "a named compressor",
            kinds=str,
            wanted="a name",
        ),
    )
    exclude: tuple[str, ...] = field(
        default=(),
        metadata=_option(
            'patterns of parameter names (`"*.bias"`) or [kinds](#rules-by-name-and-shape) that '
            "stay uncompressed; a pattern that matches nothing is an error",
            (GOSSIP, SHARD, OUTER),
        ),
    )
    rules: Mapping[str, Any] | str | os.PathLike[str] = field(
        default_factory=dict,
        metadata=_option(
            "other compressors for some parameters, [by name and "
            "shape](#rules-by-name-and-shape); the first match counts, and a rule that gets no "
            "parameter is an error",
            (GOSSIP, SHARD, OUTER),
        ),
    )
    min_size: int | None = field(
        default=None,
        metadata=_option(
            "tensors with fewer elements stay uncompressed; by default 0 for compressors that "
            "work in groups or whose payloads add, and for other scopes than tensors, else 1024",
            (GOSSIP, SHARD, OUTER, GROUP),
            kinds=int | None,
            wanted="a whole number, or None",
        ),
    )
    scratch: int = field(
        default=SCRATCH,
        metadata=_option(
            "bytes of a GPU's memory that kernels may need for a tensor; a tensor that needs "
            "more stays uncompressed. Default 2 GiB; `topk` needs 4 bytes an element of the "
            "largest tensor, `powersgd` 4, `dgc` 16, `thc` 20, compressors in groups none",
            kinds=int,
            wanted="a whole number of bytes",
        ),
    )
    down: str | Codec | None = field(
        default=AUTO,
        metadata=_option(
            "the compressor for averages on their way back, with error feedback of its own; by "
            "default the same; `None`: float32",
            (OUTER, ALL_REDUCE, GROUP),
        ),
    )
    topology: int | tuple[tuple[int, ...], ...] | None = field(
        default=None,
        metadata=_option(
            "the ranks that share a node, for `hierarchical`: ranks per node, or a list of "
            "ranks for each node; by default by LOCAL_WORLD_SIZE, which torchrun sets, or host "
            "names",
            (GOSSIP, SHARD, ALL_REDUCE, GROUP),
        ),
    )
    policy: Policy | None = field(
        default=None,
        metadata=_option(
            "changes the compression [during training](#policies)",
        ),
    )
    seed: int = field(
        default=0,
        metadata=_option(
            "seed of compressors that draw random numbers; ranks, tensors and steps always draw "
            "different ones, and draws that all ranks share do not depend on it",
            (GOSSIP, SHARD, OUTER, ALL_REDUCE, GROUP),
            kinds=int,
            wanted="a whole number",
        ),
    )
    timeout: float = field(
        default=default_pg_timeout.total_seconds(),
        metadata=_option(
            "seconds to wait for another rank, at the start and in a step; by default the "
            "process group's. DDP's own messages keep the group's",
            (GOSSIP, SHARD, OUTER, ALL_REDUCE, GROUP),
            kinds=int | float,
            wanted="seconds, or a timedelta",
        ),
    )
    checksum: bool = field(
        default=False,
        metadata=_option(
            "a CRC-32 with every compressed message: a damaged one is an error that names its "
            "sender. Takes 0.25 ms for 1 MB, 2.5 ms for 10 MB on either side, on a busy "
            "machine. Refused over NCCL, where no host sees messages",
            (GOSSIP, SHARD, OUTER),
            kinds=bool,
            wanted="True or False",
        ),
    )
    verify: bool = field(
        default=False,
        metadata=_option(
            "compares hashes of averages between ranks in every step, and of parameters in the "
            "second step and every 100 steps after it: slow, for finding faults",
            kinds=bool,
            wanted="True or False",
        ),
    )
    transport: str = field(
        default=AUTO,
        metadata=_option(
            '`"auto"`, `"gloo"`, `"staged"`, `"host"`, `"nccl"`, `"nccl4py"` or `"pynccl"`: [on '
            "GPUs](../start/gpu.md#which-way-do-payloads-travel)",
            (SHARD, GROUP),
            kinds=str,
            wanted="a name",
        ),
    )
    capture: bool | str = field(
        default=AUTO,
        metadata=_option(
            "on GPUs over NCCL, where no lengths vary: launch a bucket's synchronization as a "
            'CUDA graph, from the third step on. `"auto"`: [if a trial finds it '
            "faster](../how/cuda.md#between-gpus)",
        ),
    )
    params: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=_option(
            "other names: a parameter of the compressor, such as `ratio`",
            (GOSSIP, OUTER, ALL_REDUCE, GROUP),
        ),
    )

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
        for each in fields(self):
            option, value = declared(each), getattr(self, each.name)
            if option.kinds is None:  # it has a check of its own
                continue
            truth = isinstance(value, bool) and option.kinds is not bool  # an int to Python
            if truth or not isinstance(value, option.kinds):
                raise ConfigError(f"{each.name} is {option.wanted}, not {value!r}")
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


def declared(option: Field[Any]) -> Option:
    """The declaration of a field of Options."""
    made: Option = option.metadata["option"]
    return made


def table() -> list[tuple[str, str, str]]:
    """Rows of the options: name, effect, and ways in that take it besides wrap, attach and
    Synchronizer."""
    rows = [(each.name, declared(each)) for each in fields(Options)]
    return [
        (f"`{name}`", each.words, ", ".join(f"`{w}`" for w in each.ways)) for name, each in rows
    ]


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
