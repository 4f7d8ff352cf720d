"""A broken payload in the middle of a batch, decoded by the CUDA source on the CPU."""

import re

import numpy as np
import pytest

import compll
from compll.backends.cuda import source as cuda_source
from compll.errors import PayloadError
from compll.runtime.library import type_check
from tests.compll.cuda_host import kernels

LENGTHS = (1500, 2500, 0, 700)


def truncated(data, rng):
    return data[: int(rng.integers(0, len(data)))]


def with_a_wrong_head(data, rng):
    data[: min(8, len(data))] = rng.integers(0, 256, min(8, len(data)))
    return data


def with_a_wrong_body(data, rng):
    data[8:] = rng.integers(0, 256, len(data) - 8)
    return data


@pytest.mark.parametrize("breaks", [truncated, with_a_wrong_head, with_a_wrong_body])
@pytest.mark.parametrize("spec", ["dgc", "stc", "dithering", "threelc", "int3_group", "adacomp"])
def test_the_other_pieces_are_decoded(spec, breaks, rng):
    given = {"entropy": True} if spec == "int3_group" else {}
    device = kernels(spec, **given)
    reference = compll.compile(spec, "reference", **given)
    parts = [reference.encode(rng.standard_normal(n).astype(np.float32)) for n in LENGTHS]
    parts[1] = breaks(parts[1].copy(), rng)
    used = np.array([len(part) for part in parts])
    starts = np.cumsum([0, *LENGTHS[:-1]])
    table = np.array(
        [[s, n, i, 0, 0] for i, (s, n) in enumerate(zip(starts, LENGTHS, strict=True))]
    )
    out = np.ones(sum(LENGTHS), np.float32)
    at = np.cumsum([0, *used[:-1]])
    device.decode_batch(np.concatenate(parts), table, at, used, out, add=True)
    for start, n, part in zip(starts, LENGTHS, parts, strict=True):
        try:
            wanted = reference.decode(part, n) + np.float32(1)
        except PayloadError:
            wanted = np.ones(n, np.float32)
            assert n == LENGTHS[1]
            with pytest.raises(PayloadError, match=spec):
                device.raise_found()
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(out[start : start + n], wanted)
    device.raise_found()


@pytest.mark.parametrize("spec", ["topk", "dgc", "stc", "threelc", "lossless"])
def test_threads_of_a_block_agree_about_a_bad_payload(spec):
    """Kernels that find payloads bad once had each thread read the flag, which another block could
    set in between: some warps left and others wrote by shared memory that nobody had filled."""
    text = cuda_source.source(type_check(spec, {})[0], 64).text
    kernels = re.findall(r"(?s)__global__ void .*?(\w+)\((.*?)\n}\n", text)
    later = [(n, b) for n, b in kernels if "wrong + p, errors" in b and "*p_wrong = 0;" not in b]
    assert later
    for name, body in later:
        assert "if (__syncthreads_or(wrong[p])) return;" in body, name
        assert "if (wrong[p])" not in body, name
