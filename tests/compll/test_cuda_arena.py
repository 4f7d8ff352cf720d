"""Places of the CUDA backend's scratch arrays: arrays that are used at once have memory apart."""

import numpy as np

from compll.backends.cuda.plans import ALIGNED, arranged, bytes_of, offsets
from tests.compll.cuda_host import codec as codec_on


def test_live_arrays_do_not_overlap():
    rng = np.random.default_rng(5)
    for _ in range(300):
        count = int(rng.integers(0, 20))
        sizes = [int(s) for s in rng.integers(0, 3000, count) * rng.integers(0, 2, count)]
        lives = [tuple(sorted(int(k) for k in rng.integers(0, 9, 2))) for _ in range(count)]
        at, end = offsets(sizes, lives)
        for i in range(count):
            assert at[i] % ALIGNED == 0
            assert at[i] + sizes[i] <= end <= sum(-(-s // ALIGNED) * ALIGNED for s in sizes)
            for j in range(i):
                together = lives[i][0] <= lives[j][1] and lives[j][0] <= lives[i][1]
                apart = at[i] + sizes[i] <= at[j] or at[j] + sizes[j] <= at[i]
                assert not (together and sizes[i] and sizes[j]) or apart


def test_arrays_of_turns_in_a_row_take_as_much_as_two():
    assert offsets([512] * 6, [(k, k + 1) for k in range(6)])[1] == 1024


def test_arrays_that_stay_zero_have_a_zone_of_their_own():
    made = arranged(
        (("uint8", 300), ("float32", 8), ("uint8", 5)), [(0, 1)] * 3, [False, True, True]
    )
    assert made.zones == (256 + 5, 300)
    assert [(p.zone, p.at) for p in made.places] == [(1, 0), (0, 0), (0, 256)]


def soil(kernels):
    """Have what calls leave in shared memory be anything before the next one."""
    lend = kernels.lend

    def soiled(use, b):
        arrays = lend(use, b)
        for array, place in zip(arrays, b.scratch.places, strict=True):
            if use != "states":
                assert place.zone or not array.any(), place
                array.view(np.uint8)[:] = 255 * place.zone
        return arrays

    kernels.lend = soiled


def summed(codec, n, x, state, step):
    """The result of all rounds of one rank."""
    table, sums, y = np.array([[0, n, 0, 0, 0]]), [], x.copy()
    how = {"workers": 1, "state": state, "step": step, "seed": 1}
    for number, one in enumerate(codec.rounds):
        out, at = np.zeros(one.payload_bytes(n), np.uint8), np.zeros(1, np.int64)
        codec.encode_round(number, y, table, out, at, sums, **how)
        sums.append((out, at))
    codec.decode_rounds(y, table, sums, **how)
    return y, *(out for out, _ in sums)


def coded(codec, n, x, state, step):
    """A payload, what it decodes to, that added to zeros, and the payload of it and x."""
    made = codec.encode(x.copy(), state=state, seed=1, step=step)
    result = [made, codec.decode(made, n, step=step)]
    table, at, out = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64), np.zeros_like(x)
    codec.decode_batch(made, table, at, np.array([len(made)]), out, add=True, step=step)
    more, x = np.zeros(codec.payload_bytes(n), np.uint8), x.copy()
    taken = (made, at, np.array([len(made)])) if codec.fuses else None
    if taken is None:
        x += result[1]
    used = codec.encode_batch(x, table, more, at, state=state, incoming=taken, step=step)
    return [*result, out, more[: int(used[0])]]


def test_calls_need_nothing_of_what_others_leave(case, reference, rng):
    """Memory that they share holds NaN and -1 before each call."""
    name, params = case
    codec = codec_on(name, **params)
    soil(codec.backend)
    if codec.fuses:
        soil(codec.backend.hop())
    for n in (1061, 5000, 33):
        states = [reference.init_state(n) for _ in range(2)]
        for step in range(2):
            x = rng.standard_normal(n).astype(np.float32)
            for call in (coded, summed) if codec.rounds else (coded,):
                for given in (states, (None, None)) if states[0] else ((None, None),):
                    pair = zip((codec, reference), given, strict=True)
                    ours, theirs = (call(c, n, x, state, step) for c, state in pair)
                    for one, other in zip(ours, theirs, strict=True):
                        np.testing.assert_array_equal(one, other)
            for key, kept in states[0].items():
                np.testing.assert_array_equal(kept, states[1][key])


def test_zones_hold_what_plans_tell():
    """Bytes for each element of a plan that uses its arrays one after another."""
    launching = codec_on("sparseloco").backend
    plan, n = launching.source.plans["feed"], 1 << 20
    made = launching.share_work(plan, [n]).scratch
    sizes = [bytes_of(place.dtype, place.length) for place in made.places]
    assert sum(made.zones) < 0.55 * sum(sizes)
    for k, each in enumerate(made.places):
        for j, other in enumerate(made.places[:k]):
            (a, b), (c, d) = plan.lives[k], plan.lives[j]
            apart = each.at + sizes[k] <= other.at or other.at + sizes[j] <= each.at
            always = each.zone == 0  # which live between calls, too
            assert each.zone != other.zone or apart or not (always or (a <= d and c <= b)), (k, j)
