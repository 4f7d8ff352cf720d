"""The generated CUDA source, executed on the CPU (see cuda_host), against the reference backend."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compll.backends import cuda_source
from compll.backends.cuda import Kernels
from compll.errors import PayloadError, SpecError
from compll.library import type_check
from tests.compll.cuda_host import HostDevice

SIZES = (1, 7, 31, 33, 64, 1000, 1024, 1025, 3 * 1024 + 5)


@pytest.fixture
def typed(case):
    return type_check(case[0], case[1])


def kernels(typed, threads=256):
    module, params = typed
    try:
        source = cuda_source.source(module, threads)
    except SpecError as why:
        pytest.skip(f"refused: {why}")
    return Kernels(module, params, HostDevice(source), source)


def pieces(lengths, gap=3):
    """A table of pieces that begin at odd places, and where their payloads begin."""
    starts = np.cumsum([0, *lengths[:-1]]) + gap * np.arange(1, len(lengths) + 1)
    rows = [
        [s, n, i % 3, 64 * i, s - gap] for i, (s, n) in enumerate(zip(starts, lengths, strict=True))
    ]
    return np.array(rows, np.int64), int(starts[-1] + lengths[-1])


def places(codec, lengths, gap):
    sizes = [codec.payload_bytes(n) + gap for n in lengths]
    return np.cumsum([gap, *sizes[:-1]]).astype(np.int64), sum(sizes) + gap


@pytest.mark.parametrize("threads, gap", [(256, 0), (64, 1), (32, 6)])
def test_a_batch_is_encoded_as_by_the_reference(case, typed, reference, rng, threads, gap):
    device = kernels(typed, threads)
    lengths = [0, *SIZES] if threads == 64 else SIZES[::-1]
    table, total = pieces(lengths)
    at, room = places(reference, lengths, gap)
    x = rng.standard_normal(total).astype(np.float32)
    held, wanted = reference.init_state(total, 3), reference.init_state(total, 3)
    for step in range(2):
        out, expected = np.full(room, 7, np.uint8), np.full(room, 7, np.uint8)
        ours, theirs = x.copy(), x.copy()
        used = device.encode_batch(
            ours, table, out, at, held, seed=5, step=step, scale=0.5, writeback=True
        )
        wants = reference.encode_batch(
            theirs, table, expected, at, state=wanted, seed=5, step=step, scale=0.5, writeback=True
        )
        assert used.tolist() == wants.tolist()
        for start, size in zip(at.tolist(), wants.tolist(), strict=True):
            np.testing.assert_array_equal(out[start : start + size], expected[start : start + size])
        np.testing.assert_array_equal(ours, theirs)
        for name in held:
            np.testing.assert_array_equal(held[name], wanted[name], err_msg=name)
        got, want = x.copy(), x.copy()
        device.decode_batch(out, table, at, used, got, add=step == 1)
        reference.decode_batch(expected, table, at, wants, want, add=step == 1)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("gradient", ["float16", "bfloat16"])
def test_16_bit_gradients_are_read_and_written(typed, reference, rng, gradient):
    device = kernels(typed)
    n = 2 * 1024 + 77
    values = rng.standard_normal(n).astype(np.float16)
    raw = values if gradient == "float16" else values.view(np.uint16) & 0xFFF0 | 0x3000
    wide = (
        values.astype(np.float32)
        if gradient == "float16"
        else (raw.astype(np.uint32) << 16).view(np.float32)
    )
    wide = np.where(np.isfinite(wide), wide, 0).astype(np.float32)
    raw = raw if gradient == "float16" else (wide.view(np.uint32) >> 16).astype(np.uint16)
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out = np.zeros(reference.payload_bytes(n), np.uint8)
    used = device.encode_batch(raw, table, out, at, None, seed=1, step=2, scale=1, writeback=False)
    expected = reference.encode(wide, seed=1, step=2)
    np.testing.assert_array_equal(out[: int(used[0])], expected)
    got = np.zeros(n, raw.dtype)
    device.decode_batch(out, table, at, used, got, add=False)
    want = reference.decode(expected, n)
    if gradient == "float16":
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, want.astype(np.float16))
    else:
        near = (got.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(near, want, rtol=2.0**-8)


def test_what_is_not_finite_arrives_and_enters_no_state(typed, reference, rng):
    device = kernels(typed)
    n = 1500
    x = rng.standard_normal(n).astype(np.float32)
    x[[3, 700]] = np.nan, np.inf
    state = reference.init_state(n)
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out = np.zeros(reference.payload_bytes(n), np.uint8)
    used = device.encode_batch(x, table, out, at, state, seed=0, step=0, scale=1, writeback=False)
    got = np.zeros(n, np.float32)
    device.decode_batch(out, table, at, used, got, add=False)
    assert not np.isfinite(got).all()
    assert all(np.isfinite(s).all() for s in state.values())
    again = device.encode_batch(
        np.zeros(n, np.float32), table, out, at, state, seed=0, step=0, scale=1, writeback=False
    )
    device.decode_batch(out, table, at, again, got, add=False)
    assert np.isfinite(got).all()


def test_a_broken_payload_is_told_as_by_the_reference(typed, reference, rng):
    device = kernels(typed)
    n = 1500
    good = reference.encode(rng.standard_normal(n).astype(np.float32))
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    for turn in range(12):
        payload = broken(good, turn, rng)
        out = np.full(n, 3, np.float32)
        if reference.fixed and len(payload) != len(good):
            continue  # Codec refuses it before any kernel runs
        device.decode_batch(payload, table, at, np.array([len(payload)]), out, add=True)
        try:
            values = reference.decode(payload, n)
        except PayloadError:
            with pytest.raises(PayloadError, match=reference.name):
                device.raise_found()
            np.testing.assert_array_equal(out, 3)
        else:
            device.raise_found()
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(out, values + np.float32(3))


def broken(payload, turn, rng):
    """A payload with something wrong, by turns."""
    data = payload.copy()
    if turn % 4 == 0:
        return data[: rng.integers(0, len(data))]
    if turn % 4 == 1:
        return rng.integers(0, 256, len(data), dtype=np.uint8)
    places = rng.integers(0, len(data) if turn % 4 == 2 else min(16, len(data)), 3)
    data[places] = rng.integers(0, 256, 3)
    return data


def test_no_access_outside_the_buffers():
    """Encode and decode of good and of broken payloads, under AddressSanitizer."""
    asan = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    env = os.environ | {
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "tests.compll.cuda_host.hostile"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[:4000]
    assert "within their buffers" in done.stdout
