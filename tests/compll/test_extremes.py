"""Backends agree on extreme values, and write nowhere outside their arrays."""

import itertools

import numpy as np
import pytest

import compll
from compll.numerics import halves
from tests.compll.conftest import variants
from tests.compll.cuda_host.pieces import decode_alike, pieces_equal
from tests.tiers import first_fast

N = 3000


def values():
    rng = np.random.default_rng(7)
    base = rng.standard_normal(N).astype(np.float32)
    at = np.arange(N)
    with np.errstate(all="ignore"):
        return {
            "1e38": base / np.abs(base).max() * np.float32(1e38),
            "largest": np.sign(base) * np.float32(3.4e38),
            "some 3e38": np.where(at % 100 == 5, np.float32(3e38), base),
            "denormal": (base * 1e-41).astype(np.float32),
            "one denormal": np.where(at == 5, np.float32(1e-45), np.float32(0)),
            "all scales": (base * 10.0 ** rng.uniform(-45, 37, N)).astype(np.float32),
            "nan": np.where(at % 1000 == 3, np.float32(np.nan), base),
            "inf": np.where(at == 7, np.float32(np.inf), base),
            "both inf": np.where(at % 9 == 7, np.copysign(np.float32(np.inf), base), base),
            "nan at the end": np.where(at == N - 1, np.float32(np.nan), base),
            "only nan": np.full(N, np.nan, np.float32),
        }


EXTREMES = values()


def bits(array):
    values = np.asarray(array)
    return values.view(f"u{values.itemsize}")


def steps(codecs, x, state):
    """Payloads and decoded values of two steps, and the states after each."""
    with np.errstate(all="ignore"):
        states = [c.init_state(N) if state else {} for c in codecs]
        for step in range(2):
            payloads = [
                c.encode(x.copy(), state=s or None, step=step)
                for c, s in zip(codecs, states, strict=True)
            ]
            decoded = [c.decode(payloads[0], N) for c in codecs]
            yield payloads, decoded, states


@variants
def test_backends_agree(cpu, reference):
    """States stay finite, and the decoder gets a flag for values that are not."""
    for (kind, x), state in itertools.product(EXTREMES.items(), {False, cpu.stateful}):
        for payloads, decoded, states in steps((cpu, reference), x, state):
            assert np.array_equal(*payloads), (kind, state)
            assert np.array_equal(*map(bits, decoded)), (kind, state)
            for name, held in states[0].items():
                assert np.array_equal(bits(held), bits(states[1][name])), (kind, name)
                assert np.isfinite(halves.read(held)).all(), (kind, name)
            assert np.isfinite(x).all() or not np.isfinite(decoded[0]).all(), (kind, state)


@pytest.mark.parametrize("scale", [1.0, 1e-36, 1e-38, 1e-41])
def test_zeros_are_zeros_beside_whatever_else(scale):
    """Unbiased codecs with as many levels below zero as above decode zeros to zeros."""
    x = (values()["all scales"] * 0 + np.arange(N) % 7 - 3).astype(np.float32) * np.float32(scale)
    x[::5] = 0
    for name in ("int8_group", "int4_group", "int3_group", "tern_group", "qsgd", "natural"):
        codec = compll.compile(name)
        decoded = np.stack([codec.decode(codec.encode(x, seed=seed), N) for seed in range(3)])
        assert not decoded[:, x == 0].any(), name
        assert np.abs(decoded).max() <= max(2 * np.abs(x).max(), 2.0**-118), name


def test_a_step_after_a_non_finite_one_is_clean(cpu):
    clean = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    for kind, x in EXTREMES.items():
        if np.isfinite(x).all():
            continue
        state = cpu.init_state(N) or None
        with np.errstate(all="ignore"):
            cpu.encode(x, state=state)
        assert np.isfinite(cpu.decode(cpu.encode(clean, state=state, step=1), N)).all(), kind


def test_arguments_that_are_not_written(cpu, reference, rng):
    """x (without write-back), the payload, and the state of other pieces stay unchanged."""
    n, room = 2049, 2049 + 80
    for codec, offset in itertools.product((cpu, reference), (0, 1, 3)):
        whole = rng.standard_normal(room).astype(np.float32)
        table = np.array([[33 + offset, n, 0, 0, 20 + offset]])
        state = codec.init_state(room)
        for held in state.values():
            halves.keep(held, np.float32(0.25))
        x, out = whole.copy(), np.full(codec.payload_bytes(n) + 40, 0xAB, np.uint8)
        used = codec.encode_batch(x, table, out, np.array([17 + offset]), state=state or None)
        assert np.array_equal(bits(x), bits(whole))
        assert (out[: 17 + offset] == 0xAB).all()
        assert (out[17 + offset + codec.payload_bytes(n) :] == 0xAB).all()
        for held in state.values():
            if len(held) < room:  # of the whole tensor
                continue
            assert (halves.read(held[: 20 + offset]) == 0.25).all()
            assert (halves.read(held[20 + offset + n :]) == 0.25).all()
        before, y = out.copy(), np.full(room, 7, np.float32)
        codec.decode_batch(out, table, np.array([17 + offset]), used, y)
        assert np.array_equal(out, before)
        assert (y[: 33 + offset] == 7).all()
        assert (y[33 + offset + n :] == 7).all()


def test_backends_agree_on_what_is_a_payload(cpu, reference, rng):
    """Damaged payloads: both refuse, or both decode to the same bits."""
    n = 300
    payload = cpu.encode(rng.standard_normal(n).astype(np.float32))
    for _ in range(60):
        wrong = payload.copy()
        for at in rng.integers(0, len(wrong), 3):
            wrong[at] = rng.integers(256)
        decode_alike((cpu, reference), wrong[: len(wrong) - int(rng.integers(3))], n)


FED = ["dgc", "randomk", "qsparse", "efsignsgd", "powersgd", "stc", "sidco_gp", "ef21", "threelc"]


@pytest.mark.parametrize("name", first_fast(FED))
def test_a_huge_gradient_spoils_its_own_step_alone(name, rng):
    """Residuals of 1e38 made every later sum over the tensor infinite, and so stayed for good."""
    for given in ({}, {"bits": 16}) if name == "dgc" else ({},):
        codec, n = compll.compile(name, "cpu", **given), 4096
        for huge in (1e5, 1e20, 1e29, 6e37):
            state = codec.init_state(n)
            for step in range(6):
                x = rng.standard_normal(n).astype(np.float32) * np.float32(huge if step == 1 else 1)
                decoded = codec.decode(codec.encode(x, state=state, step=step), n, step=step)
                assert step == 1 or np.isfinite(decoded).all(), (huge, step)


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_states_have_the_same_largest_value_on_all_backends(kept, tmp_path, rng):
    text = (
        f"name: held\nstate: {{m: '{kept}[n]', t: float32}}\nencode:\n  q: g + m\n  s: max(g) + t\n"
        "payload: {q: 'float32[n]', s: float32}\ndecode: q + s\nupdate: {m: g, t: max(g)}\n"
    )
    near = np.nextafter(np.float32(2.0**48), np.float32([0, np.inf])).tolist()
    values = [2.0**48, *near, 2.0**48 - 2.0**39, 2.0**48 - 2.0**40, 1e38, np.inf, 1.0]

    def gradient(n):
        return np.resize(np.float32(values), n) * rng.choice([-1, 1], n)

    pieces_equal(text, tmp_path, gradient)
    codecs = [compll.compile(tmp_path / "spec.yaml", target) for target in ("reference", "cpu")]
    states = [codec.init_state(8) for codec in codecs]
    for codec, state in zip(codecs, states, strict=True):
        codec.encode(np.float32(values), state=state)
    assert states[0]["m"].tobytes() == states[1]["m"].tobytes()
    assert np.count_nonzero(states[0]["m"]) == (4 if kept == "float32" else 2)
