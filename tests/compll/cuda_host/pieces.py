"""Specs given as text: results of the shim's kernels, and of the reference."""

import numpy as np

import compll
from compll.backends.cuda import backend as cuda
from compll.errors import PayloadError
from compll.runtime.batches import Encoding
from tests.compll.cuda_host import kernels

#: the first has tiles that are ready (see prelude.cuh), others have none
SIZES = (4096, 1, 2, 31, 1024, 0, 1025, 2001)


def compiled(text, folder, **params):
    """The shim's kernels of a spec, and its reference codec."""
    path = folder / "spec.yaml"
    path.write_text(text)
    return kernels(path, **params), compll.compile(path, "reference", **params)


def bits(values):
    """The bytes of values; all NaNs are alike."""
    nan = np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    return np.where(nan, np.array(np.nan, values.dtype) if nan.any() else values, values).tobytes()


def pieces_equal(
    text, folder, values, step=3, lengths=SIZES, writeback=False, scale=1, on=("cuda",), **params
):
    """Compare a batch of pieces of these sizes, encoded and decoded on these backends, with the
    reference: payloads, values and states."""
    device, reference = compiled(text, folder, **params)
    for target in on:
        cuda_ = target == "cuda"
        own = device if cuda_ else compll.compile(folder / "spec.yaml", target, **params).backend
        batches_equal(own, reference, values, step, lengths, writeback, scale)


def batches_equal(own, reference, values, step, lengths, writeback, scale):
    """Two batches; the second finds the first one's values in scratch memory."""
    starts = np.cumsum([0, *lengths[:-1]])
    rows = enumerate(zip(starts, lengths, strict=True))
    table = np.array([[s, n, i, 0, s] for i, (s, n) in rows])
    sizes = [reference.payload_bytes(n) for n in lengths]
    at = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
    how = Encoding(seed=2, step=step, scale=scale, writeback=writeback)
    x = values(sum(lengths)).astype(np.float32)
    states = [reference.init_state(sum(lengths), len(lengths)) for _ in range(2)]
    for turn in range(2):
        results = []
        for backend, state in zip((own, reference.backend), states, strict=True):
            if isinstance(backend, cuda.Kernels):
                backend.device.descending = turn == 1
            mine, out, got = x.copy(), np.zeros(sum(sizes), np.uint8), np.zeros_like(x)
            with np.errstate(all="ignore"):
                used = backend.encode_batch(mine, table, out, at, state or None, how)
                backend.decode_batch(out, table, at, used, got, add=False, step=step)
            results.append([used, out, got, mine, *state.values()])
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
            assert bits(one) == bits(other)
        x = x[::-1].copy()


def decoded(codec, data, n):
    """Values of a payload added to threes, in a larger array; None, and nothing written, if it is
    refused."""
    table, out = np.array([[32, n, 0, 0, 0]]), np.full(n + 64, 3, np.float32)
    used, refused = np.array([len(data)]), False
    try:
        with np.errstate(all="ignore"):
            codec.decode_batch(data, table, np.zeros(1, np.int64), used, out, add=True)
            getattr(codec, "backend", codec).raise_found()
    except PayloadError:
        refused = True
    values, beside = out[32 : n + 32], np.concatenate([out[:32], out[n + 32 :]])
    assert (beside == 3).all()
    assert not refused or (values == 3).all()
    return None if refused else values


def decode_alike(codecs, data, n):
    """True if all decode a payload to the same values, False if all refuse it."""
    found = [decoded(codec, data, n) for codec in codecs]
    taken = [values is not None for values in found]
    assert len(set(taken)) == 1, taken
    assert len({bits(values) for values in found if values is not None}) < 2
    return taken[0]
