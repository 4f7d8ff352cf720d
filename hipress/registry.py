"""What hipress keeps for the objects that it is attached to: one table for all ways in."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

T = TypeVar("T")

#: by a DDP module, a Synchronizer or a Gossip: a Session; by a model of FSDP2: a Sharding; by an
#: Outer: a SiteModel; by a process group: its GroupChannels. A collected key takes its entry along
_ATTACHED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def put(target: object, kept: object) -> None:
    """Keep something for an object, which it must not refer to, as long as that lives."""
    _ATTACHED[target] = kept


def get(target: object, kind: type[T]) -> T | None:
    """What is kept for an object; None for nothing, or something of another kind."""
    try:
        kept = _ATTACHED.get(target)
    except TypeError:  # an object of which no key can be made
        return None
    return kept if isinstance(kept, kind) else None


def drop(target: object) -> None:
    """Forget an object, unless it is forgotten."""
    _ATTACHED.pop(target, None)


def every(kind: type[T]) -> list[tuple[Any, T]]:
    """All objects for which something of a kind is kept. Other threads may add some meanwhile."""
    targets = [each for reference in _ATTACHED.keyrefs() if (each := reference()) is not None]
    return [(each, kept) for each in targets if (kept := get(each, kind)) is not None]
