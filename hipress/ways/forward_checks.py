"""Checks in the forward pass for parameters that DDP does not train correctly."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress import registry
from hipress.errors import SyncError
from hipress.model.snapshot import Snapshot
from hipress.session import Session

ADVICE = 'With hipress.wrap: hipress.wrap(model, ..., ddp_kwargs={"find_unused_parameters": True})'
#: modules that have the hook already: it stays
_CHECKED: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def check_forward_passes(
    ddp: DistributedDataParallel, session: Session, parameters: Sequence[nn.Parameter]
) -> None:
    """Until hipress is detached, check in each forward pass that DDP's parameters are the same."""
    again = (
        "To go on, hipress.detach the module, and hipress.wrap its .module anew, which takes the "
        "parameters as they are then"
    )
    rank = session.coordinator.ranks[session.rank]
    session.snapshot = Snapshot(ddp.module, session.params, parameters, rank, again, hooked=True)
    if ddp not in _CHECKED:
        # this imports torch._dynamo, which takes as long as torch
        from hipress.ways.changes import refuse_changes

        ddp.register_forward_pre_hook(refuse_changes)
        _CHECKED.add(ddp)


def advise(ddp: DistributedDataParallel) -> None:
    """Add the cause to DDP's error on unused parameters, or the way to allow them."""
    ddp.register_forward_hook(_advise, always_call=True)


def _advise(ddp: nn.Module, inputs: object, output: object) -> None:
    """Add a note to DDP's error; a forward hook, which torch calls on errors, too."""
    error = sys.exc_info()[1]
    unused = isinstance(error, RuntimeError) and "find_unused_parameters=True" in str(error)
    if error is None or not unused:
        return
    note, session = ADVICE, registry.get(ddp, Session)
    try:
        if session is not None and session.snapshot is not None:
            session.snapshot.refuse_unhooked(every=True)
            session.snapshot.refuse_frozen()
    except SyncError as changed:
        note = str(changed)
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
