"""Results of single operators on an array, on the CPU and by the reference."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np

import compll


@cache
def compiled(encode, payload, target, params):
    """The codec of a spec that stores its computed values."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "operator.yaml"
        names = ", ".join(f"{name}: {{type: int, default: {value}}}" for name, value in params)
        path.write_text(
            f"name: operator\nparams: {{{names}}}\nencode:\n{encode}\npayload: {payload}\n"
            f"decode: g0\n".replace("payload: {", "payload: {g0: 'float32[n]', ")
            .replace("encode:\n", "encode:\n  g0: g\n")
        )  # fmt: skip
        return compll.compile(path, target)


def computed(x, encode, payload, step=0, **params):
    """The payload behind x itself, as float32; checks that the CPU and the reference agree."""
    given = tuple(sorted(params.items()))
    found = [
        compiled(encode, payload, target, given).encode(x, step=step)[4 * len(x) :]
        for target in ("cpu", "reference")
    ]
    assert np.array_equal(*found)
    whole = len(found[0]) // 4 * 4
    return found[0][:whole].view(np.float32)
