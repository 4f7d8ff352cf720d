"""The CPU kernels equal the reference backend bit for bit."""

import itertools

import numpy as np
import pytest

import compll
from compll.numerics import draws, halves
from tests.compll.conftest import CASES, costing, modules, variants
from tests.compll.world import World

#: test_payload_net.py has larger ones
SIZES = (0, 1, 7, 31, 33, 64, 65, 1000, 1023, 1024, 1025, 4099)


def bits(values):
    values = np.asarray(values)
    return values.view(f"u{values.itemsize}")


@variants
def test_encode_and_decode(cpu, reference, rng):
    for n, fed in itertools.product(SIZES, {False, cpu.stateful}):
        states = [c.init_state(n) if fed else None for c in (cpu, reference)]
        for step in range(2):
            x = rng.standard_normal(n).astype(np.float32)
            ours, theirs = (
                c.encode(x, state=s, seed=3, step=step)
                for c, s in zip((cpu, reference), states, strict=True)
            )
            assert np.array_equal(ours, theirs), (n, fed, step)
            decoded = reference.decode(theirs, n, step=step)
            assert np.array_equal(bits(cpu.decode(ours, n, step=step)), bits(decoded)), (n, step)
            total = np.full(n, 0.5, np.float32)
            cpu.decode_add(ours, total, step=step)
            assert np.array_equal(bits(total), bits(decoded + np.float32(0.5))), (n, fed, step)
            for name in states[0] or {}:
                assert np.array_equal(bits(states[0][name]), bits(states[1][name])), (n, step, name)


def batch(codec, rng, guard=3):
    """Three pieces of two tensors, at odd places, with room between the payloads."""
    lengths = [1000, 8 * 1024 + 5, 3]
    rows, at, start, byte = [], [], 2, guard
    for i, n in enumerate(lengths):
        rows.append([start, n, min(i, 1), 1024 * i, start + 4])
        at.append(byte)
        start += n + 1
        byte += codec.payload_bytes(n) + guard
    x = rng.standard_normal(start + 2).astype(np.float32)
    return x, np.array(rows), np.array(at), byte


@variants
def test_batches(cpu, reference):
    for writeback in {False, cpu.reencodes}:
        batches_agree(cpu, reference, writeback)


def batches_agree(cpu, reference, writeback):
    results = []
    for codec in (cpu, reference):
        x, table, at, size = batch(codec, np.random.default_rng(5))
        state = codec.init_state(len(x) + 8, 2) or None
        out = np.full(size, 0xAB, np.uint8)
        used = codec.encode_batch(
            x, table, out, at, state=state, seed=9, step=2, scale=0.25, writeback=writeback
        )
        results.append((x, out, used, state))
    (x, out, used, state), (x2, out2, used2, state2) = results
    assert np.array_equal(used, used2)
    assert np.array_equal(bits(x), bits(x2))
    for a, u in zip(at, used, strict=True):
        assert np.array_equal(out[a : a + u], out2[a : a + u])
    for name in state or {}:
        assert np.array_equal(bits(state[name]), bits(state2[name]))
    room = np.zeros(len(out), bool)
    for a, n in zip(at, table[:, 1], strict=True):
        room[a : a + cpu.payload_bytes(int(n))] = True
    assert (out[~room] == 0xAB).all()
    y = np.full(len(x), 7, np.float32)
    cpu.decode_batch(out, table, at, used, y, step=2)
    inside = np.zeros(len(x), bool)
    for start, n in table[:, :2]:
        inside[start : start + n] = True
    assert (y[~inside] == 7).all()
    if writeback:
        # The owner of a partition holds the values that its peers decode.
        assert np.array_equal(bits(y[inside]), bits(x[inside]))


def test_non_finite_values_are_written_back_as_decoded(cpu, reference):
    """Otherwise the owner of a partition would hold finite values, and its peers NaN."""
    for bad in (np.nan, np.inf, -np.inf) if cpu.reencodes else ():
        is_written_back(cpu, reference, bad)


def is_written_back(cpu, reference, bad):
    results = []
    for codec in (cpu, reference):
        x, table, at, size = batch(codec, np.random.default_rng(5))
        x[table[[0, 2], 0] + 1] = bad
        state, out = codec.init_state(len(x) + 8, 2) or None, np.zeros(size, np.uint8)
        used = codec.encode_batch(x, table, out, at, state=state, seed=9, writeback=True)
        results.append(x)
        y = x.copy()
        for start, n in table[:, :2]:
            y[start : start + n] = 7
        codec.decode_batch(out, table, at, used, y)
        assert np.array_equal(bits(y), bits(x))
    np.testing.assert_array_equal(*results)


def test_payload_length(cpu, rng):
    for n in SIZES:
        size = len(cpu.encode(rng.standard_normal(n).astype(np.float32)))
        bound = cpu.payload_bytes(n)
        assert size == bound if cpu.fixed else size <= bound
    assert 0 < cpu.payload_bytes(2**31 - 1) < 9 * 2**31 + 64
    if not (cpu.module.decoded is None or cpu.module.selections):
        assert 0 < cpu.payload_bytes(2**33) < 9 * 2**33
        return
    table, at = np.array([[0, 2**31, 0, 0, 0]]), np.zeros(1, np.int64)
    for refused in (
        lambda: cpu.payload_bytes(2**31),
        lambda: cpu.decode_batch(np.zeros(9, np.uint8), table, at, at + 9, np.zeros(9, np.float32)),
    ):
        with pytest.raises(compll.UsageError, match=f"{cpu.name}: .* int32.* of 2147483648"):
            refused()


WITH_ROUNDS = [case for case, one in zip(CASES, modules(CASES), strict=True) if one.rounds]


@pytest.mark.parametrize("case", [*map(costing, WITH_ROUNDS)])
def test_rounds(case, rng):
    """Ranks of both backends agree in all rounds; one rank's are encode and decode."""
    (name, params), sizes = case, (0, 1, 33, 1000, 4099)
    for n, workers in itertools.product(sizes, (1, 2, 4)):
        worlds = [World(name, workers, n, target, **params) for target in ("cpu", "reference")]
        codec, state = worlds[0].codec, worlds[0].codec.init_state(n)
        for step in range(2):
            xs = rng.standard_normal((workers, n)).astype(np.float32)
            ours, theirs = (world.step([*xs], step) for world in worlds)
            assert np.array_equal(bits(ours), bits(theirs)), (n, workers, step)
            for one, other in zip(*(world.states for world in worlds), strict=True):
                assert all(np.array_equal(bits(one[k]), bits(other[k])) for k in one)
            if workers == 1:
                payload = codec.encode(xs[0], state=state or None, step=step)
                assert np.array_equal(codec.decode(payload, n, step=step), ours)
                assert all(np.array_equal(state[k], worlds[0].states[0][k]) for k in state)


@pytest.mark.parametrize("case", [*map(costing, WITH_ROUNDS)])
def test_non_finite_values_of_one_rank_reach_all(case, rng):
    name, params = case
    for bad, place in itertools.product((np.nan, np.inf, -np.inf), (0, 500, 998)):
        world = World(name, 3, 999, **params)
        xs = [*rng.standard_normal((3, 999)).astype(np.float32)]
        world.step(xs)
        xs[place % 3][place] = bad
        assert not np.isfinite(world.step(xs, 1)).all()
        assert all(
            np.isfinite(halves.read(s)).all() for all_ in world.states for s in all_.values()
        )
        xs[place % 3][place] = 0
        assert np.isfinite(world.step(xs, 2)).all()


def test_draws_across_the_32_bit_boundary(cpu, reference, rng):
    n = 4096
    x = rng.standard_normal(n).astype(np.float32)
    for before in (2048, 500):
        table, payloads = np.array([[0, n, 3, 2**32 - before, 0]]), []
        for codec in (cpu, reference):
            out = np.zeros(codec.payload_bytes(n), np.uint8)
            used = codec.encode_batch(x, table, out, np.zeros(1, np.int64), seed=1)
            payloads.append(out[: used[0]])
        assert np.array_equal(*payloads), before


def test_uniform_draws_are_uniform_and_independent():
    u = draws.uniform(1, 2, 3, 0, 0, 1 << 18)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram2d(u[:-1], u[1:], bins=32, range=[[0, 1], [0, 1]])[0]
    chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert abs(chi - 1023) < 5 * np.sqrt(2 * 1023)
    for other in (draws.uniform(2, 2, 3, 0, 0, 1 << 18), draws.uniform(1, 3, 3, 0, 0, 1 << 18)):
        assert abs(np.corrcoef(u, other)[0, 1]) < 5 / 512


@pytest.mark.slow
def test_draws_in_searches_beyond_32_bits(tmp_path):
    """A search walks over a whole piece; it once used the keys of its first element for all."""
    path = tmp_path / "searched.yaml"
    path.write_text(
        "name: searched\nencode:\n  t: kth_largest(g + random(0, 1), ceil(n / 9))\n"
        "payload: {t: float32}\ndecode: t\n"
    )
    x, table = np.zeros(2000, np.float32), np.array([[0, 2000, 3, 2**32 - 1024, 0]])
    payloads = []
    for target in ("cpu", "reference"):
        out, codec = np.zeros(9, np.uint8), compll.compile(path, target)
        codec.encode_batch(x, table, out, np.zeros(1, np.int64))
        payloads.append(out)
    np.testing.assert_array_equal(*payloads)


@pytest.mark.slow
def test_write_back_draws_tile_by_tile(tmp_path):
    """Values that a later walk writes back once had, in every tile, the draws of the last tile."""
    path = tmp_path / "back.yaml"
    path.write_text(
        "name: back\nencode: {q: 'g + random(0, 1)', top: max(g)}\n"
        "payload: {q: 'int32[n]', top: bfloat16}\ndecode: q / top\n"
    )
    codec, out = compll.compile(path, "cpu"), np.zeros(4 * 3000 + 3, np.uint8)
    x = np.linspace(0, 9, 3000, dtype=np.float32)
    table, at = np.array([[0, 3000, 0, 0, 0]]), np.zeros(1, np.int64)
    used = codec.encode_batch(x, table, out, at, writeback=True)
    np.testing.assert_array_equal(x, codec.decode(out[: used[0]], 3000))


@pytest.mark.slow
def test_without_a_state_there_is_a_fresh_one(tmp_path):
    """Also for a residual: -0.0 + 0.0 is 0.0."""
    path = tmp_path / "counted.yaml"
    path.write_text(
        "name: counted\n"
        "state: {s: 'float32[n]'}\n"
        "encode:\n  v: where(s > 1, 0, g)\n"
        "payload: {v: 'float32[n]'}\n"
        "decode: v\n"
        "update: {s: s + 1}\n"
        "feedback: error\n"
    )
    x = np.array([-0.0, 0.0, -1.5], np.float32)
    codecs = [compll.compile(path, target) for target in ("reference", "cpu")]
    payloads = {
        c.encode(x, state=state)[:12].tobytes() for c in codecs for state in (None, c.init_state(3))
    }
    assert payloads == {np.array([0.0, 0.0, -1.5], np.float32).tobytes()}
