"""Tasks without a pass over memory of their own: fused merges, and payloads in the bucket.

A merge may be part of the encode that follows it: decode, add and encode in one kernel. And a raw
payload that is summed natively may stay in the bucket.

Only the last of an owner's merges is fused. A chunk is in the processor's cache: decoding and
adding takes no longer than decoding alone, and one kernel for all payloads would save 5% of an
owner's work at 4 ranks and 9% at 8 (int4_group, 262144 elements), while payloads that have arrived
would wait for the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from casync.building.tasks import Decode, Encode, Merge, Reduce
from casync.codec import Codec
from casync.graph.graph import Program
from casync.raw import RAW

__all__ = ["fused_merges", "in_place"]


def fused_merges(program: Program, codecs: Mapping[str, Codec]) -> dict[int, int]:
    """Encodes that take in the payload of the merge just before them: encode -> merge.

    No other task may depend on the merge, and its result in the bucket must be overwritten: by the
    encode's write-back, or by a decode that comes next.
    """
    merges = {}
    last: dict[int, int] = {}  # part -> its latest task on the bucket
    for i, task in enumerate(program.tasks):
        if not isinstance(task, Encode | Decode | Merge):
            continue
        before = last.get(task.part)
        if (
            isinstance(task, Encode)
            and before is not None
            and isinstance(program.tasks[before], Merge)
            and program.tasks[before].codec == task.codec
            and program.unlocks[before] == (i,)
            and codecs[task.codec].fuses
            and (task.writeback or _overwritten(program, i))
        ):
            merges[i] = before
        last[task.part] = i
    return merges


def _overwritten(program: Program, index: int) -> bool:
    """True if the next task on the same piece of the bucket replaces it."""
    part = program.tasks[index].part
    following = (
        task
        for task in program.tasks[index + 1 :]
        if task.part == part and isinstance(task, Encode | Decode | Merge)
    )
    return isinstance(next(following, None), Decode)


def in_place(program: Program) -> frozenset[int]:
    """Raw payloads of one run whose only tasks are an encode, a reduce and a decode."""
    uses: dict[int, list[type]] = defaultdict(list)
    touches: dict[int, int] = defaultdict(int)  # part -> tasks on its piece of the bucket
    for task in program.tasks:
        uses[task.payload].append(type(task))
        touches[task.part] += isinstance(task, Encode | Decode | Merge)
    return frozenset(
        task.payload
        for task in program.tasks
        if uses[task.payload] == [Encode, Reduce, Decode]
        and task.codec == RAW
        and len(program.parts[task.part].rows) == 1
        and touches[task.part] == 2
    )
