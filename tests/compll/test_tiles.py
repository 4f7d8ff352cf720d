"""Tile programs on the CPU: other processors' vectors, the cache of objects, calls at once."""

import llvmlite.binding as llvm
import numpy as np
import pytest

import compll
from compll.backends.cpu import instructions, jit
from compll.backends.cpu.backend import TileKernels
from compll.runtime.batches import Encoding
from tests.compll.cuda_host.pieces import decode_alike
from tests.tiers import first_fast

SIZES = (1, 100, 1024, 2048 + 77)


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """An empty cache."""
    for name in ("usual", "folder", "spare"):
        monkeypatch.setattr(jit, name, lambda kind: tmp_path)
    return tmp_path


def machine(name):
    """Another processor, for which LLVM compiles."""
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(name, "", opt=3, reloc="pic")


def fresh(name):
    """A spec's kernels, newly made, not those of other tests."""
    codec = compll.compile(name, "reference")
    return codec, TileKernels(codec.module, codec.params)


def encoded(kernels, codec, x, step):
    """Payload, state and decoded values."""
    n = len(x)
    table, at = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
    out, y = np.zeros(codec.payload_bytes(n), np.uint8), np.zeros(n, np.float32)
    state = codec.init_state(n) or None
    used = kernels.encode_batch(x, table, out, at, state, Encoding(5, step))
    kernels.decode_batch(out, table, at, used, y, add=False)
    return [out[: used[0]], y, *(state or {}).values()]


@pytest.mark.parametrize("processor", ["x86-64-v3", "x86-64-v2"])
@pytest.mark.parametrize(
    "name",
    first_fast(
        [
            "fp16",
            "topk",
            "threshold",
            "onebit_group",
            "int4_group",
            "terngrad",
            "natural",
            "stc",
            "tern_group",
            "threelc",
            "sketch",
            "dithering",
            "inceptionn",
        ]
    ),
)
def test_narrower_vectors_give_the_same_bits(name, processor, empty, monkeypatch, rng):
    if not llvm.get_process_triple().startswith("x86_64"):
        pytest.skip("another family of processors")
    jit.machine()
    monkeypatch.setattr(jit, "machine", lambda: machine(processor))
    monkeypatch.setattr(jit, "linker", lambda: llvm.create_lljit_compiler(machine(processor)))
    monkeypatch.setattr(instructions, "COMPRESSES", False)
    monkeypatch.setattr(instructions, "SOFT_HALVES", processor == "x86-64-v2")
    monkeypatch.setattr(instructions, "MASKED", False)
    codec, kernels = fresh(name)
    reference = codec.backend
    for n in SIZES:
        x = (rng.standard_normal(n) * np.exp(6 * rng.standard_normal(n))).astype(np.float32)
        found = [encoded(one, codec, x.copy(), 1) for one in (kernels, reference)]
        for one, other in zip(*found, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[:-9], lambda d: d[:-1] + b"x"])
def test_a_damaged_object_is_made_again(damage, empty, monkeypatch):
    fresh("fp16")
    (file,) = empty.glob("fp16_*.o")
    whole = file.read_bytes()
    monkeypatch.setattr(jit, "optimized", lambda text: pytest.fail("compiled"))
    fresh("fp16")  # from the cache
    monkeypatch.undo()
    file.write_bytes(damage(whole))
    image = jit._checked
    with pytest.raises(OSError, match="damaged"):
        image(file.read_bytes())
    for name in ("usual", "folder"):
        monkeypatch.setattr(jit, name, lambda kind: empty)
    fresh("fp16")
    assert image(file.read_bytes()) == whole[32:]


def test_a_full_disk_is_no_hindrance(empty, monkeypatch):
    def full(path, data):
        raise OSError("no space left")

    monkeypatch.setattr(jit, "write", full)
    codec, kernels = fresh("bf16")
    x = np.arange(100, dtype=np.float32)
    assert np.array_equal(encoded(kernels, codec, x, 0)[1], x)
    assert not [*empty.glob("*.o")]


def test_seeds_of_64_bits_are_taken(rng):
    codec = compll.compile("int4_group")
    reference = compll.compile("int4_group", "reference")
    x = rng.standard_normal(500).astype(np.float32)
    for seed in (2**63, 2**64 - 1):
        assert np.array_equal(codec.encode(x, seed=seed), reference.encode(x, seed=seed))


SELECTED = (1, 17, 1000, 1024, 5000, 70000)
GRADIENTS = {
    "normal": lambda x: x,
    "ties": lambda x: np.round(2 * x),
    "zeros": lambda x: 0 * x,
    "half zeros": lambda x: np.where(np.arange(len(x)) % 1000 < 500, 0, x),
    "not finite": lambda x: np.where(np.arange(len(x)) % 7, x, np.nan) / (np.arange(len(x)) % 11),
    "sorted": np.sort,
}


@pytest.mark.parametrize(
    "name",
    ["topk", "threshold", "adaptive_threshold", "wangni"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("stc", "qsparse", "dithering", "inceptionn", "sketch", "threelc")
    ],
)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_selection_equals_the_reference(gradient, name, rng):
    """A batch of pieces, some larger than the sample from which the threshold is found."""
    codec, kernels = fresh(name)
    table = np.array(
        [[sum(SELECTED[:i]), n, i, 0, sum(SELECTED[:i])] for i, n in enumerate(SELECTED)]
    )
    sizes = [codec.payload_bytes(n) for n in SELECTED]
    at = np.cumsum([0, *sizes[:-1]])
    with np.errstate(all="ignore"):
        x = GRADIENTS[gradient](rng.standard_normal(sum(SELECTED))).astype(np.float32)
    before = rng.integers(-1, 2, len(x)).astype(np.float32)

    def made(backend):
        out, y, added = np.zeros(sum(sizes), np.uint8), np.ones_like(x), np.ones_like(x)
        state = {name: before.copy() for name in codec.init_state(1)}
        used = backend.encode_batch(
            x.copy(), table, out, at, state, Encoding(seed=1, step=2, scale=0.5, writeback=False)
        )
        backend.decode_batch(out, table, at, used, y, add=False)
        backend.decode_batch(out, table, at, used, added, add=True)
        return out, used, y, added, *state.values()

    with np.errstate(all="ignore"):
        for one, other in zip(made(kernels), made(codec.backend), strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("wrong", [(1000, 1001), (3, 3), (4, 3), (2**32 - 1,)])
def test_positions_that_do_not_ascend_in_their_piece_are_refused_before_anything_is_written(
    wrong, rng
):
    codec, kernels = fresh("topk")
    x = rng.standard_normal(2000).astype(np.float32)
    table, at = np.array([[0, 1000, 0, 0, 0], [1000, 1000, 1, 0, 1000]]), np.array([0, 80])
    out, y = np.zeros(160, np.uint8), np.ones_like(x)
    used = kernels.encode_batch(x, table, out, at, None, Encoding(1, 2))
    out[80:][: 4 * len(wrong)] = np.array(wrong, "<u4").view(np.uint8)
    for backend in (kernels, codec.backend):
        with pytest.raises(compll.PayloadError, match=r"outside the tensor of 1000 .* above"):
            backend.decode_batch(out, table, at, used, y, add=False)
        assert (y[1000 if backend is codec.backend else 0 :] == 1).all()


@pytest.mark.parametrize("place", range(0, 40, 3))
def test_a_damaged_stream_is_refused_as_by_the_reference_or_read_alike(place, rng):
    codec, kernels = fresh("threshold")
    out = codec.encode(np.where(rng.random(3000) < 0.01, 1, 0).astype(np.float32))
    for value in (0, 127, 128, 255):
        damaged = out.copy()
        damaged[place] = value
        decode_alike((kernels, codec), damaged, 3000)


def test_memory_that_is_not_there_is_told_with_the_tensor(monkeypatch):
    codec = compll.compile("threelc")
    given = {"table": np.array([[0, 3000, 0, 0, 0]])}

    def empty(size, dtype):
        raise MemoryError

    kernel = next(k for part in codec.backend.parts.values() for k in part if k.scratch)
    monkeypatch.setattr("compll.backends.cpu.backend.np.empty", empty)
    with pytest.raises(compll.UsageError, match=r"threelc: a tensor of 3000 .* encode it in parts"):
        codec.backend.scratch(kernel, given["table"])
