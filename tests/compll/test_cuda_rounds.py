"""Rounds of specs that are computed an array at a time, by generated CUDA source on the CPU."""

import numpy as np
import pytest

import compll
from compll.runtime.batches import Encoding
from compll.runtime.library import type_check
from tests.compll.conftest import CASES, costing
from tests.compll.test_cuda import WHERE, gradients_of_16_bits, kernels, pieces
from tests.compll.world import payload
from tests.compll.world import values as numbers_of

WITH_ROUNDS = [c for c in CASES if compll.compile(c[0], "reference", **c[1]).rounds]
WORKERS = 3


@pytest.fixture(params=map(costing, WITH_ROUNDS))
def both(request):
    """A spec's typed module, and its reference codec."""
    name, params = request.param
    return type_check(name, params), compll.compile(name, "reference", **params)


@pytest.fixture(params=WHERE)
def where(request):
    return request.param


class World:
    """The device's rank 0 in a world whose other ranks are the reference's, and its twin there."""

    def __init__(self, both, where, threads, lengths, rng):
        typed, self.codec = both
        self.real = where == "gpu"
        self.device = kernels(typed, where, threads)
        self.put, self.get = self.device.device.upload, self.device.device.download
        self.lengths = lengths
        self.table, total = pieces(lengths)
        self.x = rng.standard_normal((WORKERS, total)).astype(np.float32)
        self.states = [self.codec.init_state(total, 16) for _ in range(WORKERS)]
        self.held = {name: self.put(s) for name, s in self.states[0].items()}

    def synchronize(self, step, *, fed=True, gradient=lambda x: x):
        """All rounds; compares the bytes of each. Returns the device's decoded values."""
        sums, given = [], []
        options = {"workers": WORKERS, "seed": 4, "step": step}
        mine = self.put(gradient(self.x[0]))
        for number, one in enumerate(self.codec.rounds):
            sizes = [one.payload_bytes(n) + 1 for n in self.lengths]
            at = np.cumsum([1, *sizes[:-1]]).astype(np.int64)
            sent = np.zeros((WORKERS, sum(sizes) + 1), np.uint8)
            for rank, x in enumerate(self.x):
                state = self.states[rank] if fed else None
                used = self.codec.encode_round(
                    number, x, self.table, sent[rank], at, sums, state=state, **options
                )
            out = self.put(np.zeros(sent.shape[1], np.uint8))
            state = self.held if fed else None
            how = Encoding(**options)
            got = self.device.encode_round(number, mine, self.table, out, at, given, state, how)
            assert self.get(got).tolist() == used.tolist()
            self.payloads_equal(one, self.get(out), sent[0], at)
            sums.append((self.combined(one, sent, at), at))
            given.append((self.put(sums[-1][0]), at))
        for rank, x in enumerate(self.x):
            state = self.states[rank] if fed else None
            self.codec.decode_rounds(x, self.table, sums, state=state, **options)
        state = self.held if fed else None
        self.device.decode_rounds(mine, self.table, given, state, Encoding(**options))
        return self.get(mine)

    def payloads_equal(self, one, found, wanted, at):
        """A device has only one NaN: for payloads with NaNs, numbers are compared, not bits."""
        if not self.real:
            np.testing.assert_array_equal(found, wanted, err_msg=one.name)
            return
        for begin, n in zip(at.tolist(), self.lengths, strict=True):
            part = slice(begin, begin + one.payload_bytes(n))
            pair = [numbers_of(each[part].copy(), one.dtype) for each in (found, wanted)]
            np.testing.assert_array_equal(*pair, err_msg=one.name)

    def combined(self, one, sent, at):
        """The result of an all-reduce of the payloads."""
        out = sent[0].copy()
        for begin, n in zip(at.tolist(), self.lengths, strict=True):
            part = slice(begin, begin + one.payload_bytes(n))
            values = np.stack([numbers_of(s[part].copy(), one.dtype) for s in sent])
            with np.errstate(all="ignore"):
                made = values.max(0) if one.op == "max" else values.sum(0, dtype=values.dtype)
            out[part] = payload(made, one.dtype)
        return out

    def states_equal(self):
        for name, held in self.held.items():
            np.testing.assert_array_equal(self.get(held), self.states[0][name], err_msg=name)


@pytest.mark.parametrize("threads", [pytest.param(256, marks=pytest.mark.slow), 64])
def test_rounds_are_those_of_the_reference(both, where, threads, rng):
    world = World(both, where, threads, [1000, 0, 2 * 1024 + 5, 1, 33, 1024], rng)
    for step in (3, 4):
        world.x[:] = rng.standard_normal(world.x.shape)
        np.testing.assert_array_equal(world.synchronize(step), world.x[0])
        world.states_equal()


FILTERED = """
name: filtered
about: A state keeps what a filter leaves out.
state: {left: 'float32[n]'}
encode:
  least: mean(abs(g))
  kept: filter(abs(g) > least)
  value: g
payload: {least: 'float32', value: 'float32[n]'}
rounds: {least: mean, value: mean}
decode: value
update: {left: 'where(kept, 0, g)'}
"""


def test_payloads_of_rounds_have_no_counts(where, tmp_path, rng):
    path = tmp_path / "filtered.yaml"
    path.write_text(FILTERED)
    for target in ("reference", "cpu"):
        both = type_check(path, {}), compll.compile(path, target)
        world = World(both, where, 64, [1000, 33], rng)
        np.testing.assert_array_equal(world.synchronize(3), world.x[0])
        world.states_equal()


def test_rounds_without_a_state(both, where, rng):
    world = World(both, where, 64, [700, 1500], rng)
    np.testing.assert_array_equal(world.synchronize(2, fed=False), world.x[0])


def test_non_finite_values_reach_all_ranks_and_no_state(both, where, rng):
    for bad in (np.nan, np.inf):
        world = World(both, where, 64, [1500], rng)
        world.x[0, 703] = bad
        found = world.synchronize(2)
        np.testing.assert_array_equal(found, world.x[0], err_msg=str(bad))
        assert not np.isfinite(found).all()
        world.states_equal()
        assert all(np.isfinite(s).all() for s in world.states[0].values())


@pytest.mark.slow
def test_rounds_of_float16_gradients(both, where, rng):
    world = World(both, where, 64, [1300, 77], rng)
    narrow, wide = gradients_of_16_bits(rng, world.x.shape[1], "float16")
    world.x[0] = wide
    found = world.synchronize(0, gradient=lambda x: narrow)
    np.testing.assert_array_equal(found, world.x[0].astype(np.float16))
    world.states_equal()
