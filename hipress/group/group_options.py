"""Options of a process group `hipress`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, SupportsIndex

from casync.codec import Codec
from hipress import options as options_
from hipress.errors import ConfigError
from hipress.options import AUTO
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

        min_size: smaller tensors, of fewer elements, stay uncompressed. timeout: also of the inner
        group; by default torch's. Raises ConfigError.
        """
        self.settings = options_.make(
            compressor, min_size=min_size, strategy=strategy, down=down, topology=topology,
            seed=seed, timeout=timeout, transport=transport, params=params,
        )  # fmt: skip
        if self.settings.automatic:
            raise ConfigError('a group needs a compressor by name: "auto" plans for a model')
        if transport == "host":
            raise ConfigError('a group compresses where its tensors are: no transport="host"')
        codec = resolve(self.settings)
        strategy_for(codec, strategy, resolve_down(self.settings, codec))
        #: read by init_device_mesh, which passes it on
        self._timeout = None if timeout is None else timedelta(seconds=self.settings.timeout)
