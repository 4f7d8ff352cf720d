"""Which merges are part of the encode that follows them: decode, add and encode in one kernel."""

from __future__ import annotations

from collections.abc import Mapping

from casync.codec import Codec
from casync.graph.graph import Program
from casync.graph.tasks import Decode, Encode, Merge

__all__ = ["fused"]


def fused(program: Program, codecs: Mapping[str, Codec]) -> dict[int, int]:
    """Encodes that take in the payload of the merge just before them: encode -> merge.

    The merge must feed nothing else, and what it would have left in the bucket must be
    overwritten: by the encode's write-back, or by a decode that comes next.
    """
    found = {}
    last: dict[int, int] = {}  # part -> its latest task on the bucket
    for i, task in enumerate(program.tasks):
        codec = program.parts[task.part].codec
        if not isinstance(task, Encode | Decode | Merge) or codec is None:
            continue
        before = last.get(task.part)
        if (
            isinstance(task, Encode)
            and before is not None
            and isinstance(program.tasks[before], Merge)
            and program.unlocks[before] == (i,)
            and codecs[codec].fuses
            and (task.writeback or _overwritten(program, i))
        ):
            found[i] = before
        last[task.part] = i
    return found


def _overwritten(program: Program, index: int) -> bool:
    """Whether the next task on the same piece of the bucket replaces it."""
    part = program.tasks[index].part
    following = (
        task
        for task in program.tasks[index + 1 :]
        if task.part == part and isinstance(task, Encode | Decode | Merge)
    )
    return isinstance(next(following, None), Decode)
