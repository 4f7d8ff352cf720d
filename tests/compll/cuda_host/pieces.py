"""Specs given as text: results of the shim's kernels, and of the reference."""

import numpy as np

import compll
from compll.backends.cuda import backend as cuda
from compll.backends.cuda import source as cuda_source
from compll.runtime.batches import Encoding
from compll.runtime.library import type_check
from tests.compll.cuda_host import HostDevice

#: the first has tiles that are ready (see prelude.cuh), others have none
SIZES = (4096, 1, 2, 31, 1024, 0, 1025, 2001)


def compiled(text, folder, **params):
    """The shim's kernels of a spec, and its reference codec."""
    path = folder / "spec.yaml"
    path.write_text(text)
    module, known = type_check(path, params)
    device = cuda.Kernels(module, known, HostDevice, cuda_source.source(module, 64))
    return device, compll.compile(path, "reference", **params)


def bits(values):
    """The bytes of values; all NaNs are alike."""
    nan = np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    return np.where(nan, np.array(np.nan, values.dtype) if nan.any() else values, values).tobytes()


def pieces_equal(text, folder, values, step=3, lengths=SIZES, writeback=False, scale=1, **params):
    """Compare encode and decode of a batch of pieces of these sizes with the reference."""
    device, reference = compiled(text, folder, **params)
    starts = np.cumsum([0, *lengths[:-1]])
    rows = enumerate(zip(starts, lengths, strict=True))
    table = np.array([[s, n, i, 0, s] for i, (s, n) in rows])
    sizes = [reference.payload_bytes(n) for n in lengths]
    at = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
    options = {"seed": 2, "step": step, "scale": scale, "writeback": writeback}
    x = values(sum(lengths)).astype(np.float32)
    wanted = reference.init_state(sum(lengths), len(lengths))
    held = {name: s.copy() for name, s in wanted.items()}
    for turn in range(2):  # the second finds the first one's values in scratch memory
        device.device.descending = turn == 1
        ours, theirs = np.zeros(sum(sizes), np.uint8), np.zeros(sum(sizes), np.uint8)
        mine, its = x.copy(), x.copy()
        used = device.encode_batch(mine, table, ours, at, held, Encoding(**options))
        wants = reference.encode_batch(its, table, theirs, at, state=wanted, **options)
        np.testing.assert_array_equal(mine, its)
        assert bits(mine) == bits(its)
        assert used.tolist() == wants.tolist()
        np.testing.assert_array_equal(ours, theirs)
        for name in held:
            np.testing.assert_array_equal(held[name], wanted[name])
            assert bits(held[name]) == bits(wanted[name]), name
        got, want = np.zeros_like(x), np.zeros_like(x)
        device.decode_batch(ours, table, at, used, got, add=False)
        reference.decode_batch(theirs, table, at, wants, want, add=False)
        np.testing.assert_array_equal(got, want)
        assert bits(got) == bits(want)
        x = x[::-1].copy()
