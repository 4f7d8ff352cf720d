"""The generated CUDA source, executed on the CPU (see cuda_host), against the reference backend."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import compll
from compll.backends.cuda import backend as cuda
from compll.backends.cuda import device as cuda_device
from compll.backends.cuda import source as cuda_source
from compll.errors import PayloadError, SpecError, UsageError
from compll.numerics import halves
from compll.runtime.batches import Encoding, Incoming
from compll.runtime.library import type_check
from tests.compll.conftest import KINDS, each_kind, variants
from tests.compll.cuda_host import HostDevice, hostile
from tests.compll.cuda_host.pieces import decoded

#: the first begins where tiles are ready (see prelude.cuh), most others do not
SIZES = (2 * 1024, 1, 7, 33, 64, 1000, 1024)


@pytest.fixture
def typed(case):
    return type_check(case[0], case[1])


def on_gpu():
    """True if CuPy finds a device; without one only the shim proves the kernels."""
    try:
        cuda_device.cupy()
    except UsageError:
        return False
    return True


WHERE = ["shim", *([pytest.param("gpu", marks=pytest.mark.gpu)] if on_gpu() else [])]


@pytest.fixture(params=WHERE)
def where(request):
    return request.param


def kernels(typed, where="shim", threads=256):
    module, params = typed
    try:
        source = cuda_source.source(module, threads)
    except SpecError as why:
        pytest.skip(f"refused: {why}")
    host = partial(HostDevice, descending=threads == 64)
    device = host if where == "shim" else cuda_device.CupyDevice
    return cuda.Kernels(module, params, device, source)


def pieces(lengths, gap=3):
    """A table of pieces with states at other places; all but the first begin at odd places."""
    starts = np.cumsum([0, *lengths[:-1]]) + gap * np.arange(len(lengths))
    rows = [
        [s, n, i, 64 * i, max(0, s - gap)]
        for i, (s, n) in enumerate(zip(starts, lengths, strict=True))
    ]
    return np.array(rows, np.int64), int(starts[-1] + lengths[-1])


def places(codec, lengths, gap):
    sizes = [codec.payload_bytes(n) + gap for n in lengths]
    return np.cumsum([0, *sizes[:-1]]).astype(np.int64), sum(sizes)


@variants
def test_a_batch_is_encoded_as_by_the_reference(typed, reference, rng, where):
    batches_equal(typed, reference, rng, where, 64, 1)


@pytest.mark.slow
@each_kind
def test_a_batch_is_encoded_as_by_the_reference_in_blocks_of_256(typed, reference, rng, where):
    batches_equal(typed, reference, rng, where, 256, 0)


def batches_equal(typed, reference, rng, where, threads, gap):
    device = kernels(typed, where, threads)
    put, get = device.device.upload, device.device.download
    lengths = [*SIZES[:2], 0, *SIZES[2:]] if threads == 64 else SIZES[::-1]
    table, total = pieces(lengths)
    at, room = places(reference, lengths, gap)
    x = rng.standard_normal(total).astype(np.float32)
    wanted = reference.init_state(total, 16)
    held = {name: put(s) for name, s in wanted.items()}
    for step in range(2):
        out, expected = put(np.full(room, 7, np.uint8)), np.full(room, 7, np.uint8)
        ours, theirs = put(x), x.copy()
        used = device.encode_batch(
            ours, table, out, at, held, Encoding(seed=5, step=step, scale=0.5, writeback=True)
        )
        wants = reference.encode_batch(
            theirs, table, expected, at, state=wanted, seed=5, step=step, scale=0.5, writeback=True
        )
        assert get(used).tolist() == wants.tolist()
        for start, size in zip(at.tolist(), wants.tolist(), strict=True):
            found = get(out)[start : start + size]
            np.testing.assert_array_equal(found, expected[start : start + size])
        np.testing.assert_array_equal(get(ours), theirs)
        for name in held:
            np.testing.assert_array_equal(get(held[name]), wanted[name], err_msg=name)
        got, want = put(x), x.copy()
        device.decode_batch(out, table, at, used, got, add=step == 1)
        reference.decode_batch(expected, table, at, wants, want, add=step == 1)
        np.testing.assert_array_equal(get(got), want)


def test_a_hop_is_decode_add_encode(typed, reference, rng, where):
    device = kernels(typed, where, 64)
    if not device.fuses:
        pytest.skip("Codec decodes first")
    for fed in (False, True):
        hops_agree(device, reference, rng, fed)


def hops_agree(device, reference, rng, fed):
    put, get = device.device.upload, device.device.download
    table, total = pieces(SIZES)
    at, room = places(reference, SIZES, 1)
    x = rng.standard_normal(total).astype(np.float32)
    taken = np.zeros(room, np.uint8)
    sizes = reference.encode_batch(-3 * x[::-1].copy(), table, taken, at)
    theirs, expected = x.copy(), np.zeros(room, np.uint8)
    reference.decode_batch(taken, table, at, sizes, theirs, add=True)
    wanted = reference.init_state(total, 16) if fed else None
    held = {name: put(s) for name, s in wanted.items()} if wanted is not None else None
    options = {"seed": 5, "step": 1, "scale": 0.5, "writeback": True}
    reference.encode_batch(theirs, table, expected, at, state=wanted, **options)
    ours, out = put(x), put(np.zeros(room, np.uint8))
    incoming = Incoming(put(taken), at, sizes)
    device.encode_batch(ours, table, out, at, held, Encoding(**options, incoming=incoming))
    np.testing.assert_array_equal(get(out), expected, err_msg=f"{fed=}")
    np.testing.assert_array_equal(get(ours), theirs, err_msg=f"{fed=}")
    for name in held or {}:
        np.testing.assert_array_equal(get(held[name]), wanted[name], err_msg=name)


@pytest.mark.parametrize("name, fed", [("terngrad", False), ("mxnet_2bit", True)])
def test_non_finite_values_are_written_back_as_decoded(name, fed, where):
    device, reference = kernels(type_check(name, {}), where), compll.compile(name, "reference")
    put, get = device.device.upload, device.device.download
    table, total = pieces(SIZES)
    at, room = places(reference, SIZES, 1)
    x = np.ones(total, np.float32)
    x[table[0, 0] + 5] = np.inf
    options = {"seed": 5, "step": 1, "scale": 1.0, "writeback": True}
    sizes = reference.encode_batch(x.copy(), table, taken := np.zeros(room, np.uint8), at)
    incoming = Incoming(put(taken), at, sizes) if fed else None
    ours, out = put(np.ones(total, np.float32) if fed else x), put(np.zeros(room, np.uint8))
    used = device.encode_batch(ours, table, out, at, None, Encoding(**options, incoming=incoming))
    decoded = put(get(ours).copy())
    device.decode_batch(out, table, at, used, decoded, add=False)
    np.testing.assert_array_equal(get(ours), get(decoded))
    assert np.isnan(get(ours)[: SIZES[0]]).all()
    assert np.isfinite(get(ours)[SIZES[0] :]).all()


@pytest.mark.slow
@each_kind
def test_16_bit_gradients_are_read_and_written(case, typed, reference, rng, where):
    gradient = ("float16", "bfloat16")[KINDS.index(case) % 2]
    device = kernels(typed, where, 64)
    put, get = device.device.upload, device.device.download
    n = 2 * 1024 + 77
    raw, wide = gradients_of_16_bits(rng, n, gradient)
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out = put(np.zeros(reference.payload_bytes(n), np.uint8))
    options = {"seed": 1, "step": 2, "scale": 1, "writeback": False}
    used = device.encode_batch(put(raw), table, out, at, None, Encoding(**options))
    expected = reference.encode(wide, seed=1, step=2)
    np.testing.assert_array_equal(get(out)[: int(get(used)[0])], expected)
    decoded = put(np.zeros(n, raw.dtype))
    device.decode_batch(out, table, at, used, decoded, add=False)
    want, got = reference.decode(expected, n), get(decoded)
    if gradient == "float16":
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, want.astype(np.float16))
    else:
        near = (got.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(near, want, rtol=2.0**-8)


def gradients_of_16_bits(rng, n, gradient):
    """Gradients as 16-bit arrays (bfloat16 as its bits), and as float32."""
    values = rng.standard_normal(n).astype(np.float32)
    if gradient == "float16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    return raw, (raw.astype(np.uint32) << 16).view(np.float32)


@each_kind
def test_non_finite_values_arrive_and_enter_no_state(typed, reference, rng, where):
    device = kernels(typed, where, 64)
    put, get = device.device.upload, device.device.download
    n = 1500
    x = rng.standard_normal(n).astype(np.float32)
    x[[3, 700]] = np.nan, np.inf
    state = {name: put(s) for name, s in reference.init_state(n).items()}
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out, got = put(np.zeros(reference.payload_bytes(n), np.uint8)), put(np.zeros(n, np.float32))
    for values, arrives in ((x, True), (np.zeros(n, np.float32), False)):
        used = device.encode_batch(put(values), table, out, at, state, Encoding())
        device.decode_batch(out, table, at, used, got, add=False)
        assert np.isfinite(get(got)).all() != arrives
        assert all(np.isfinite(halves.read(get(s))).all() for s in state.values())


@each_kind
def test_a_broken_payload_is_told_as_by_the_reference(typed, reference, rng, where):
    device = kernels(typed, where, 64)
    put, get = device.device.upload, device.device.download
    n = 1500
    good = reference.encode(rng.standard_normal(n).astype(np.float32))
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    for turn in range(12):
        payload = broken(good, turn, rng)
        if reference.fixed and len(payload) != len(good):
            continue  # Codec refuses it before any kernel runs
        out, wanted = put(np.full(n, 3, np.float32)), decoded(reference, payload, n)
        device.decode_batch(put(payload), table, at, np.array([len(payload)]), out, add=True)
        if wanted is None:
            with pytest.raises(PayloadError, match=reference.name):
                device.raise_found()
        device.raise_found()
        np.testing.assert_array_equal(get(out), 3 if wanted is None else wanted)


def broken(payload, turn, rng):
    """Payloads, each damaged in another way."""
    data = payload.copy()
    if turn % 4 == 0:
        return data[: rng.integers(0, len(data))]
    if turn % 4 == 1:
        return rng.integers(0, 256, len(data), dtype=np.uint8)
    places = rng.integers(0, len(data) if turn % 4 == 2 else min(16, len(data)), 3)
    data[places] = rng.integers(0, 256, 3)
    return data


@pytest.mark.slow
@pytest.mark.timeout(1200)  # atomo's turns of a matrix take minutes on a busy core
@pytest.mark.parametrize("spec", hostile.SPECS)
def test_no_access_outside_the_buffers(spec):
    sanitized(spec)


def sanitized(*specs):
    """Encode and decode good and broken payloads of specs under AddressSanitizer."""
    asan = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    env = os.environ | {
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "tests.compll.cuda_host.hostile", *specs]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[:4000]
    assert "within their buffers" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu(), reason="no CUDA device")
@pytest.mark.parametrize("spec", ["onebit", "int4_group", "dgc", "randomk", "powersgd", "thc"])
def test_a_gpu_captures_a_call_in_a_cuda_graph(spec, rng):
    cupy = cuda_device.cupy()
    codec, n = compll.compile(spec, "cuda"), 100_000
    x = cupy.asarray(rng.standard_normal(n).astype(np.float32))
    table, at = map(codec.hold, (np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)))
    out = cupy.zeros(codec.payload_bytes(n), "uint8")
    tick = cupy.zeros(1, "int64")
    expected = [codec.encode(x, step=step) for step in (4, 5)]
    codec.encode_batch(x, table, out, at, step=4)  # allocates scratch memory
    cupy.cuda.Device().synchronize()  # the stream of the capture does not wait for this one
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, codec.ticking(tick):
        stream.begin_capture()
        codec.encode_batch(x, table, out, at, step=4)
        graph = stream.end_capture()
        for payload in expected:
            graph.launch(stream)
            stream.synchronize()
            assert (out[: len(payload)] == payload).all()
            with stream:
                tick += 1


#: a spec of every kind of kernel; memcheck takes too long for all
SANITIZED = ("onebit_group", "threelc", "dgc", "stc", "dithering", "powersgd")
#: A chunk of CuPy's pool and a zone of scratch memory hold many arrays: an access beyond one's end
#: would be within these.
WITHOUT_POOL = """
import sys, cupy, pytest
from compll.backends.cuda.device import CupyDevice
cupy.cuda.set_allocator(None)
part = CupyDevice.part
CupyDevice.part = lambda *given: part(*given).copy()
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.gpu
@pytest.mark.timeout(570)
@pytest.mark.skipif(not on_gpu() or not shutil.which("compute-sanitizer"), reason="no sanitizer")
def test_a_gpu_finds_no_bad_access():
    specs = " or ".join((*(f"gpu-{spec}]" for spec in SANITIZED), "(int3_group-entropy and gpu)"))
    chosen = f"(encoded_as_by or decode_add_encode or broken_payload) and ({specs})"
    # calls that fail are CuPy's checks of a driver's features
    tool = ["compute-sanitizer", "--error-exitcode", "9", "--report-api-errors", "no"]
    child = [sys.executable, "-c", WITHOUT_POOL, "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*tool, *child, "-k", chosen],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    if "Device not supported" in done.stdout:
        pytest.skip("the sanitizer does not support the device")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.skipif(on_gpu(), reason="there is a CUDA device")
def test_without_a_device_the_reason_is_told():
    with pytest.raises(UsageError, match="cuda backend"):
        compll.compile("onebit", "cuda")


FUNCTIONS = """name: functions
encode:
  scale: max(abs(g))
  q: round(g / scale) + 1
  y: exp(-abs(g)) + log2(abs(g) + 1) + log(abs(g) + 0.5) + abs(g) ** 0.7
payload: {scale: float32, y: "float32[n]", q: "trit[n]"}
decode: (q - 1) * scale + y
"""


def test_functions_and_trits_are_those_of_the_reference(tmp_path, rng, where):
    path = tmp_path / "functions.yaml"
    path.write_text(FUNCTIONS)
    device, reference = kernels(type_check(path, {}), where), compll.compile(path, "reference")
    put, get = device.device.upload, device.device.download
    for n in (1, 7, 1024, 2500):
        x = (rng.standard_normal(n) * 10.0 ** rng.integers(-30, 30, n)).astype(np.float32)
        table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
        out, y = put(np.zeros(reference.payload_bytes(n), np.uint8)), put(np.zeros(n, np.float32))
        options = {"seed": 0, "step": 0, "scale": 1, "writeback": False}
        used = device.encode_batch(put(x), table, out, at, None, Encoding(**options))
        expected = reference.encode(x)
        np.testing.assert_array_equal(get(out), expected)
        device.decode_batch(out, table, at, used, y, add=False)
        np.testing.assert_array_equal(get(y), reference.decode(expected, n))
