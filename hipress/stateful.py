"""States through torch.distributed.checkpoint."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hipress.api import Synchronized, load_state_dict, state_dict
from hipress.handles import compressible, model_handle
from hipress.model.shards import as_gradient, local
from hipress.outer import outer_state
from hipress.ways.outer import Outer
from hipress.ways.process_group import CompressingGroup

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["Stateful"]


class Stateful:
    """A model's state for torch.distributed.checkpoint, loaded by any number of ranks.

    ::

        app = {"model": model, "hipress": hipress.Stateful(model)}
        dcp.save(app, checkpoint_id="checkpoints/100")
        dcp.load(app, checkpoint_id="checkpoints/100")

    It is the portable form of `hipress.state_dict`: what ranks have not delivered is one tensor by
    parameter, saved once; a DTensor like its parameter where FSDP2 shards the model, so the number
    of shards may change, too. All ranks must save and load between the same two steps.

    The ranks of a group `hipress`, or those of an Outer, that hold the same shard save their state
    once, too, and so there must be as many shards when it is loaded.
    """

    def __init__(
        self,
        model: Synchronized | dist.ProcessGroup,
        *,
        exact: bool = False,
        resume: str | os.PathLike[str] | StorageReader | None = None,
    ) -> None:
        """model: of `wrap` or `shard`, a Synchronizer, an Outer, or a process group `hipress`.

        exact: save each rank's own state, too, by which as many ranks as before go on bit for bit.
        resume: the checkpoint that will be loaded, to find these; without it, or with another
        number of ranks, the portable form is loaded.

        Raises ConfigError for a model or group that hipress does not synchronize.
        """
        if not isinstance(model, Outer | CompressingGroup):
            model_handle(model)
        self._model, self._exact, self._resume = model, exact, resume

    def state_dict(self) -> dict[str, Any]:
        """The entries to save, or to load in place. All ranks must call this. Raises the errors of
        hipress.state_dict."""
        together = dist.is_initialized()  # sites of StoreMembers may have no process group
        rank, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        own = f"rank {rank} of {size}"
        if self._resume is not None and _holds(self._resume, own):
            return {"own": {own: b""}}
        exact = {"own": {own: _pack(state_dict(self._model))}} if self._exact else {}
        if isinstance(self._model, Outer | dist.ProcessGroup):
            group = self._model.group if isinstance(self._model, Outer) else self._model
            first = rank if group is None else min(dist.get_process_group_ranks(group))
            if isinstance(self._model, Outer) and self._model.round is not None and self._exact:
                shared = outer_state.under_way(self._model.site)
            else:
                shared = state_dict(self._model, portable=True)
            return {"others": {f"ranks from {first} on": _pack(shared)}, **exact}
        handle = model_handle(self._model)
        whole = handle.portable_shards()
        undelivered = {
            name: _like(parameter, whole["undelivered"].get(name))
            for name, parameter in compressible(handle).items()
        }
        return {"undelivered": undelivered, "others": _pack(whole | {"undelivered": {}}), **exact}

    def load_state_dict(self, entries: Mapping[str, Any]) -> None:
        """Go on from loaded entries. Raises the errors of hipress.load_state_dict."""
        whole = entries.get("own", entries.get("others"))
        for packed in whole.values() if isinstance(whole, dict) else [whole]:
            state = _unpack(packed)
            if "undelivered" in entries and "own" not in entries:
                own = {name: local(each).cpu() for name, each in entries["undelivered"].items()}
                state["undelivered"] = {name: each for name, each in own.items() if each.any()}
            load_state_dict(self._model, state)


def _like(parameter: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
    """Values of a parameter, float32, distributed like it; zeros without values."""
    if values is None:
        values = torch.zeros(local(parameter).shape, device="cpu")
    return as_gradient(values, parameter)


def _pack(state: Mapping[str, Any]) -> bytes:
    """A state as one object, whose keys a loading rank need not know."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _unpack(packed: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(packed), weights_only=True)
    return state


def _holds(checkpoint: str | os.PathLike[str] | StorageReader, own: str) -> bool:
    """True if a checkpoint has this rank's own state, saved by as many ranks."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = FileSystemReader(checkpoint)
    return any(key.endswith(own) for key in checkpoint.read_metadata().state_dict_metadata)
