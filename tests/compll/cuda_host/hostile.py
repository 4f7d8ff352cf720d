"""Run every spec's kernels on good and on broken payloads; meant to run under AddressSanitizer.

Arguments: names or paths of specs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

import numpy as np

import compll
from compll.backends.cuda import backend as cuda
from compll.backends.cuda import source as cuda_source
from compll.errors import PayloadError, SpecError
from compll.runtime.batches import Encoding
from compll.runtime.library import type_check
from tests.compll.cuda_host import HostDevice

Device: TypeAlias = cuda.Kernels
SIZES = (33, 1061)
#: one of every kind of kernel; the others' source differs in arithmetic only
SPECS = (
    "onebit", "onebit_group", "int4_group", "terngrad", "fp16", "ddp_uint8", "dgc", "topk", "stc",
    "dithering", "adaq", "redsync", "threelc", "int3_group", "sketch", "adacomp", "inceptionn",
    "randomk", "powersgd", "thc", "atomo",
)  # fmt: skip
#: parameters that choose a kind of kernel
PARAMS: dict[str, dict[str, bool]] = {"int3_group": {"entropy": True}}


def run(spec: str, rng: np.random.Generator) -> bool:
    """True if the backend compiles the spec; the sanitizer ends the process on a bad access."""
    given = PARAMS.get(spec, {})
    module, params = type_check(spec, given)
    try:
        source = cuda_source.source(module, 64)
    except SpecError:
        return False
    codec = compll.compile(spec, "reference", **given)
    device = cuda.Kernels(module, params, partial(HostDevice, sanitize=True), source)
    for n, alike in ((SIZES[0], False), (SIZES[1], False), (SIZES[1], True)):
        table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
        x = np.full(n, 0.1, np.float32) if alike else rng.standard_normal(n).astype(np.float32)
        # exactly as long as promised: the sanitizer sees the first byte beyond
        out = np.zeros(codec.payload_bytes(n), np.uint8)
        state = codec.init_state(n)
        used = device.encode_batch(x, table, out, at, state, Encoding(1, 1, writeback=True))
        good = out[: int(used[0])].copy()
        if codec.rounds:
            rounds(device, codec, x, state)
        for data in (good, *broken(good, rng, codec.fixed)):
            decode(device, data, table, at, n)
    return True


def rounds(
    device: Device, codec: compll.Codec, x: np.ndarray, state: Mapping[str, np.ndarray]
) -> None:
    """All rounds of two ranks, both played by this one."""
    n, at, sums = len(x), np.zeros(1, np.int64), []
    table, how = np.array([[0, n, 0, 0, 0]], np.int64), Encoding(step=1, workers=2)
    for number, one in enumerate(codec.rounds):
        out = np.zeros(one.payload_bytes(n), np.uint8)
        device.encode_round(number, x, table, out, at, sums, state, how)
        sums.append((out, at))
    device.decode_rounds(x, table, sums, state, how)


def broken(good: np.ndarray, rng: np.random.Generator, fixed: bool) -> list[np.ndarray]:
    found = [rng.integers(0, 256, len(good), dtype=np.uint8) for _ in range(3)]
    for _ in range(3):
        data = good.copy()
        data[rng.integers(0, min(12, len(data)), 2)] = rng.integers(0, 256, 2)
        found.append(data)
    return found if fixed else [*found, good[: len(good) // 2].copy(), good[:3].copy()]


def decode(device: Device, data: np.ndarray, table: np.ndarray, at: np.ndarray, n: int) -> None:
    device.decode_batch(data, table, at, np.array([len(data)]), np.zeros(n, np.float32), add=False)
    with contextlib.suppress(PayloadError):
        device.raise_found()


def main() -> None:
    rng = np.random.default_rng(3)
    done = [spec for spec in sys.argv[1:] if run(spec, rng)]
    print(f"{len(done)} specs stay within their buffers", file=sys.stdout)


if __name__ == "__main__":
    main()
