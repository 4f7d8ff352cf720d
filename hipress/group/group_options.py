"""Options of a process group `hipress`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, SupportsIndex

from casync.codec import Codec
from hipress import options as options_
from hipress.errors import ConfigError
from hipress.options import AUTO, refuse_foreign
from hipress.plan.codecs import resolve, resolve_down, strategy_for

__all__ = ["COMPRESSOR", "MIN_SIZE", "GroupOptions"]

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
