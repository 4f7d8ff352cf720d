"""Each method against published implementations and against its own formulas."""

import itertools
from pathlib import Path

import numpy as np
import pytest

import compll
from compll.numerics import halves
from compll.runtime.library import locate, type_check
from tests.compll.world import World

GOLDEN = np.load(Path(__file__).parent / "golden" / "published.npz")
INPUTS = sorted({key.split("/")[1] for key in GOLDEN if key.startswith("input/")})


def compiled(name, **params):
    """A codec; with other parameters one of the reference, which is ready at once (test_backends
    compares all backends)."""
    return compll.compile(name, "reference" if params else "cpu", **params)


@pytest.mark.parametrize("vector", INPUTS)
@pytest.mark.parametrize(
    "method, spec", [("onebit", "onebit"), ("topk_1pct", "topk"), ("fp16", "fp16")]
)
def test_golden(method, spec, vector):
    key = f"{method}/{vector}/decoded"
    if key not in GOLDEN:
        pytest.skip("not among the published vectors")
    x, codec = GOLDEN[f"input/{vector}"], compiled(spec)
    y = codec.decode(codec.encode(x), len(x))
    if method == "topk_1pct":  # ties at the threshold may be broken either way
        assert np.allclose(np.sort(np.abs(y)), np.sort(np.abs(GOLDEN[key])), rtol=1e-5)
        y = np.where((y == 0) == (GOLDEN[key] == 0), y, GOLDEN[key])
    assert np.allclose(y, GOLDEN[key], rtol=1e-5)


def test_golden_mxnet_2bit():
    for vector in sorted({k.split("/")[1] for k in GOLDEN if k.startswith("mxnet_2bit/")}):
        held = {k.split("/")[2]: GOLDEN[k] for k in GOLDEN if k.startswith(f"mxnet_2bit/{vector}/")}
        codec = compiled("mxnet_2bit", threshold=float(held["threshold"]))
        state = codec.init_state(len(held["input0"]))
        for i in range(5):
            y = codec.decode(codec.encode(held[f"input{i}"], state=state), len(held["input0"]))
            assert np.allclose(y, held[f"decoded{i}"], rtol=1e-5)
            assert np.allclose(state["residual"], held[f"residual{i}"], atol=1e-5)


def gradient(n, seed=0):
    return (np.random.default_rng(seed).laplace(size=n) * 0.01).astype(np.float32)


@pytest.mark.parametrize(
    "name, params",
    [
        ("adacomp", {}),
        ("efsignsgd", {"lr": 0.1}),
        ("dgc", {"ratio": 0.1, "momentum": 0.0}),
        ("dgc", {"ratio": 0.02, "momentum": 0.9}),
        ("dgc", {"ratio": 0.02, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_gradient_that_is_owed_and_sent_adds_up(name, params):
    """The factors are those of `owed:`. dgc forgets the momentum of elements that it sends."""
    codec, n = compll.compile(name, "reference", **params), 3000
    state, sent, exact = codec.init_state(n), np.zeros(n), np.zeros(n)
    for step in range(6):
        x = gradient(n, step)
        sent += codec.decode(codec.encode(x, state=state, step=step), n)
        exact += x
    owed = sum(each.gradient * state[each.name] for each in codec.states)
    assert np.any(owed)
    chosen = sent == 0 if params.get("momentum") else np.full(n, fill_value=True)
    assert chosen.sum() > n / 2
    assert np.allclose((sent + owed)[chosen], exact[chosen], atol=1e-5)


def mean_decoded(codec, x, draws):
    total = np.zeros(len(x))
    for step in range(draws):
        total += codec.decode(codec.encode(x, seed=11, step=step), len(x))
    return total / draws


@pytest.mark.parametrize("name, params", [
    ("terngrad", {"clip": 1e6}), ("terngrad_uniform", {"bits": 1})])  # fmt: skip
def test_unbiased_with_other_parameters(name, params):
    x, draws = gradient(2048), 600
    codec = compiled(name, **params)
    one = codec.decode(codec.encode(x, seed=11, step=0), len(x)) - x
    # An error of mean zero shrinks with the square root of the draws.
    error = mean_decoded(codec, x, draws) - x
    assert np.linalg.norm(error) < 1.3 * np.linalg.norm(one) / np.sqrt(draws)
    assert abs(error.mean()) < 5 * one.std() / np.sqrt(draws * len(x))


@pytest.mark.parametrize("name, levels", [("int3_group", 3), ("int4_group", 7)])
def test_an_error_is_below_one_level(name, levels):
    x, codec = gradient(64 * 50), compiled(name)
    y = codec.decode(codec.encode(x), len(x))
    top = np.abs(x.reshape(-1, 64)).max(1, keepdims=True)
    assert (np.abs(y - x).reshape(-1, 64) <= 1.01 * top / levels).all()


def test_onebit_group_is_onebit_of_every_group():
    x, whole = gradient(3 * 1024 + 100), compiled("onebit_group")
    y, onebit = whole.decode(whole.encode(x), len(x)), compiled("onebit")
    for start in range(0, len(x), 1024):
        part = x[start : start + 1024].copy()
        assert np.allclose(
            y[start : start + 1024], onebit.decode(onebit.encode(part), len(part)), rtol=1e-5
        )


def test_tern_group_sends_the_largest_magnitude_of_a_group_or_nothing():
    x, codec = gradient(64 * 50 + 9), compiled("tern_group")
    for start in range(0, len(x), 64):
        part = x[start : start + 64].copy()
        y = codec.decode(codec.encode(part, step=start), len(part))
        top = np.abs(part).max()
        assert y[np.abs(part).argmax()] == pytest.approx(part[np.abs(part).argmax()], rel=1 / 128)
        assert set(np.abs(y)) <= {0, np.abs(y).max()}
        assert top <= np.abs(y).max() <= top * (1 + 1 / 128)
        assert (np.sign(y[y != 0]) == np.sign(part[y != 0])).all()


def test_terngrad_levels():
    x, codec = gradient(5000), compiled("terngrad")
    y = codec.decode(codec.encode(x), len(x))
    scale = min(np.abs(x).max(), 2.5 * x.std())
    assert np.allclose(np.unique(np.abs(y)), [0, scale], rtol=1e-5)
    assert (np.sign(y[y != 0]) == np.sign(x[y != 0])).all()


def test_terngrad_uniform_rounds_to_a_neighbouring_level():
    for bits in (1, 2, 4, 8):
        x, codec = gradient(5000), compiled("terngrad_uniform", bits=bits)
        y = codec.decode(codec.encode(x), len(x))
        gap = (x.max() - x.min()) / (2**bits - 1)
        assert np.abs(y - x).max() <= gap * 1.001
        assert len(np.unique(y)) <= 2**bits


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_follows_the_paper(nesterov):
    n, ratio, m = 20000, 0.01, 0.9
    codec = compiled("dgc", ratio=ratio, momentum=m, nesterov=nesterov)
    state, u, v = codec.init_state(n), np.zeros(n, np.float32), np.zeros(n, np.float32)
    for step in range(4):
        g = gradient(n, step)
        u = m * (u + g) if nesterov else m * u + g
        v = v + u + (g if nesterov else 0)
        y = codec.decode(codec.encode(g, state=state, step=step), n)
        sent = y != 0
        assert np.allclose(y[sent], v[sent], rtol=1e-4)
        assert np.abs(v[sent]).min() >= np.abs(v[~sent]).max() * (1 - 1e-4)
        assert 0.6 * ratio * n <= sent.sum() <= 1.3 * ratio * n + 8
        u[sent] = v[sent] = 0
        assert np.allclose(state["u"], u, atol=1e-5)
        assert np.allclose(state["v"], v, atol=1e-5)


def test_dgc_warm_up_and_clipping():
    codec = compiled("dgc", ratio=0.001, warmup=5, epoch=2)
    kept = [
        (codec.decode(codec.encode(gradient(50000), step=s), 50000) != 0).mean() for s in range(12)
    ]
    wanted = [max(0.001 ** ((s // 2 + 1) / 6), 0.001) for s in range(12)]
    assert np.allclose(kept, wanted, rtol=0.35)
    clipped = compiled("dgc", ratio=1.0, clip=0.5, workers=4)
    x = gradient(4000)
    y = clipped.decode(clipped.encode(x), 4000)
    assert np.allclose(np.linalg.norm(y), 0.25, rtol=0.02)


def test_graddrop_keeps_about_the_ratio():
    codec = compiled("graddrop", ratio=0.05)
    kept = [
        (codec.decode(codec.encode(gradient(50000, s), step=s), 50000) != 0).sum() for s in range(5)
    ]
    assert 0.7 * 2500 < np.mean(kept) < 1.3 * 2500


@pytest.mark.parametrize("k_of", [0.0, 0.01, 0.5, 1.0])
def test_topk_keeps_the_largest(k_of):
    x, codec = gradient(3001), compiled("topk", ratio=k_of)
    y = codec.decode(codec.encode(x), 3001)
    k = max(1, int(3001 * k_of))
    assert (y != 0).sum() == k
    assert np.array_equal(np.sort(np.abs(y))[-k:], np.sort(np.abs(x))[-k:])


ESTIMATORS = ("adaq", "stc", "gaussiank", "redsync", "sidco_e", "sidco_gp", "sidco_p")
#: their thresholds are searched by the reference alone, and as sidco_e's are
SLOW = ("sidco_gp", "sidco_p")
FED = [name for name in compll.list_specs() if type_check(name, {})[0].feedback]
WHOLE = [pytest.param(name, {}, marks=pytest.mark.slow if name in SLOW else ()) for name in FED]
HALF = {"residual": "bfloat16"}
KEPT_IN_HALVES = [
    pytest.param(name, HALF, marks=pytest.mark.slow)
    for name in ("onebit_group", "topk", "powersgd", "mxfp4", "graddrop")
]


def received(codec, payload, n, state, step):
    """The values that a single sender's receiver gets."""
    values = codec.decode(payload, n, step=step)
    if codec.difference is None:
        return values
    before = state["mean"].copy()
    state["mean"] += np.float32(codec.difference) * values
    return before + values


@pytest.mark.parametrize("name, residual", [*WHOLE, *KEPT_IN_HALVES])
def test_feedback_converges_on_a_quadratic(name, residual):
    params = {"mxnet_2bit": {"threshold": 0.5}}
    params |= {name: {"ratio": 0.05} for name in ("topk", "graddrop", "randomk", *ESTIMATORS)}
    # kernels that depend on the ratio, or on the residual, would be compiled for this alone
    target = "reference" if residual or name.startswith("sidco") else "cpu"
    codec = compll.compile(name, target, **params.get(name, {}), **residual)
    n, rate = 2000, 0.02
    target = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    x, state = np.zeros(n, np.float32), codec.init_state(n)
    for step in range(600):
        payload = codec.encode(x - target, state=state, step=step)
        x -= rate * received(codec, payload, n, state, step)
    assert np.linalg.norm(x - target) < 0.35 * np.linalg.norm(target)


@pytest.mark.parametrize("name, params", [("powersgd", {"rank": 2}), ("thc", {"bits": 2})])
def test_feedback_of_several_ranks_contracts_on_a_quadratic(name, params):
    """Their gradients differ."""
    targets, left = np.random.default_rng(5).standard_normal((3, 900)).astype(np.float32), []
    for feedback in (True, False):
        world, x = World(name, 3, 900, **params), np.zeros(900, np.float32)
        for step in range(200):
            x -= np.float32(0.1) * world.step([x - t for t in targets], step)
            for state in world.states if not feedback else ():
                state["residual"][:] = 0
        left.append(np.linalg.norm(x - targets.mean(0)) / np.linalg.norm(targets.mean(0)))
    assert left[0] < 0.1
    assert left[0] < left[1]


def test_residual_is_what_was_not_sent(case, cpu, rng):
    if not cpu.module.feedback or cpu.difference is not None:
        pytest.skip("no error feedback")
    n = 5000
    state, carried = cpu.init_state(n), np.zeros(n, np.float32)
    for step in range(3):
        x = rng.standard_normal(n).astype(np.float32)
        y = cpu.decode(cpu.encode(x, state=state, step=step), n, step=step)
        held = halves.read(state["residual"])
        rounding = 2.0**-8 if state["residual"].itemsize == 2 else 0
        carried = np.float32(cpu.module.decay) * carried
        assert np.allclose(held, carried + x - y, atol=1e-5, rtol=rounding)
        carried = held.copy()


def test_grouped_codecs_do_not_depend_on_partitions(case, cpu, rng):
    group = cpu.module.group
    if not group or "whole(" in locate(case[0]).read_text():
        pytest.skip("not grouped, or with a value of the whole tensor")
    n = 10 * group + 17
    x = rng.standard_normal(n).astype(np.float32)
    whole = cpu.decode(cpu.encode(x, seed=4, step=2), n)
    cuts = [0, 3 * group, 4 * group, n]
    rows = np.array([[a, b - a, 0, a, 0] for a, b in itertools.pairwise(cuts)])
    at = np.cumsum([0] + [cpu.payload_bytes(int(r[1])) for r in rows[:-1]])
    out = np.zeros(int(at[-1]) + cpu.payload_bytes(n), np.uint8)
    used = cpu.encode_batch(x, rows, out, at, seed=4, step=2)
    parts = np.zeros(n, np.float32)
    cpu.decode_batch(out, rows, at, used, parts)
    assert np.array_equal(parts, whole)


def test_draws_depend_on_seed_step_and_tensor(case, cpu, rng):
    x = rng.standard_normal(3000).astype(np.float32)
    first = cpu.encode(x, seed=1, step=1)
    assert np.array_equal(first, cpu.encode(x, seed=1, step=1))
    if case[0] in ("int3_group", "int4_group", "tern_group", "terngrad", "terngrad_uniform"):
        assert not np.array_equal(first, cpu.encode(x, seed=2, step=1))
        assert not np.array_equal(first, cpu.encode(x, seed=1, step=2))
