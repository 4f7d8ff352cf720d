"""Tables of a piece: quantiles, by digits of all keys, and means by index. See tables.cuh."""

from __future__ import annotations

from typing import Any

from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import ELEMENTS
from compll.backends.cuda.lane_arrays import own_name
from compll.ir.tile import Search

BINS = 8192  # most bins of a block's histograms in shared memory
FIRST = 11  # bits of the first round, which has one histogram
EACH = 4096  # keys of a block


def round_bits(ranks: int) -> list[int]:
    """Bits of each digit, in a search for `ranks` ranks at once."""
    most = min(FIRST, max(5, (BINS // ranks).bit_length() - 1))
    left = 32 - FIRST
    rounds = -(-left // most)
    return [FIRST, *(left // rounds + (k < left % rounds) for k in range(rounds))]


def quantiles(p: Any, step: Search) -> None:
    """Search all ranks at once: keys that have the digits found for a rank are counted by their
    next digit."""
    p.walk_kernel("keys", step.walk, {})
    count, keys = step.attr - 1, step.walk.stores[0].field
    assert keys is not None
    rounds = round_bits(count)
    bins = max(1 << FIRST, count << max(rounds[1:]))

    def memory(b: Body, number: int) -> list[str]:
        known = b.memory(f"known{count}", "uint32", -1, 2 * count)
        halves = [f"{known} + {k * count}" for k in (number % 2, 1 - number % 2)]
        return [b.memory(f"bins{count}", "uint64", -1, bins), *halves]

    b = p.open_phase()
    ranks = b.memory(f"ranks{count}", "int64", -1, count)
    b.add(
        f"for (i64 j = threadIdx.x; j < {count}; j += blockDim.x) {ranks}[j] = (j + 1) * n / {step.attr};"
    )
    shift = 32
    for number, bits in enumerate(rounds):
        shift -= bits
        with p.kernel("digits", p.plan.grid(ELEMENTS, EACH), 256) as b:
            ranked, known, _ = memory(b, number)
            own = b.memory(own_name(keys), "int32", 0, p.plan.shape.tile)
            digit = f"{bits}, {shift}, {count if number else 0}, {BINS}"
            b.add(
                f"count_ranked<{digit}>({own}, own * {EACH}, {b.given('n')}, {EACH}, {known}, {ranked});"
            )
        with p.kernel("pick", -1, 256) as b:
            ranked, known, following = memory(b, number)
            ranks = b.memory(f"ranks{count}", "int64", -1, count)
            start = str(number == 0).lower()
            b.add(
                f"pick_ranks<{bits}>({ranked}, {known}, {following}, {ranks}, {count}, {start}, {bins});"
            )
            if shift == 0:
                value = f"op_from_key((i32)(({following})[j] ^ 0x80000000u))"
                b.add(
                    f"for (int j = threadIdx.x; j < {count}; j += blockDim.x) {b.value(step.made[0])}[j] = {value};"
                )
