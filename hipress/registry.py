"""Objects to which hipress is attached, and their sessions: one table for all ways in."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

T = TypeVar("T")

#: of a DDP module, a Synchronizer or a Gossip its Session, of a model of FSDP2 its Sharding, of an
#: Outer its Site, of a process group its GroupChannels. A collected object takes its entry along
_ATTACHED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def put(target: object, entry: object) -> None:
    """Keep an entry for an object as long as that lives; it must not refer to the object."""
    _ATTACHED[target] = entry


def get(target: object, kind: type[T]) -> T | None:
    """The entry of an object; None if it has none, or one of another kind."""
    try:
        entry = _ATTACHED.get(target)
    except TypeError:  # an object of which no key can be made
        return None
    return entry if isinstance(entry, kind) else None


def drop(target: object) -> None:
    """Forget an object, unless it is forgotten."""
    _ATTACHED.pop(target, None)


def every(kind: type[T]) -> list[tuple[Any, T]]:
    """All objects with an entry of a kind. Other threads may add some meanwhile."""
    targets = [each for reference in _ATTACHED.keyrefs() if (each := reference()) is not None]
    return [(each, entry) for each in targets if (entry := get(each, kind)) is not None]
