"""The check of a wrapped module's parameters in each forward pass: a function of a module, by whose
name a pickled model has it."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from hipress import registry
from hipress.session import Session

__all__ = ["refuse_changes"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def refuse_changes(ddp: DistributedDataParallel, inputs: object) -> None:
    """A forward pre-hook that refuses changes: some of them lose the hooks of gradients."""
    session = registry.get(ddp, Session)
    if session is None or session.snapshot is None or not torch.is_grad_enabled():
        return
    if ddp.require_backward_grad_sync:
        with session.failing("a forward pass"):
            session.snapshot.refuse_changes(ddp.module)
            # DDP reports the others in the next forward pass
            session.snapshot.refuse_unhooked(every=ddp.find_unused_parameters)
