"""Workers in one process that go through a codec's rounds together."""

from __future__ import annotations

import numpy as np

import compll
from compll.numerics import halves


def table(n):
    return np.array([[0, n, 0, 0, 0]], np.int64)


def values(payload, dtype):
    """Numbers that add: NumPy has no bfloat16."""
    if dtype == "bfloat16":
        return halves.read(payload.view(np.uint16))
    return payload.view(dtype)


def payload(values, dtype):
    """The numbers' bytes, uint8."""
    if dtype == "bfloat16":
        values = halves.stored(values, np.dtype(np.uint16))
    return values.view(np.uint8)


class World:
    """`workers` of one codec; combines their fields here, in rank order."""

    def __init__(self, name, workers, n, target="cpu", **params):
        self.codec = compll.compile(name, target, **params)
        self.workers, self.n = workers, n
        self.states = [self.codec.init_state(n) for _ in range(workers)]

    def step(self, gradients, step=0):
        """The result that all workers have, bit for bit."""
        at, sums = np.zeros(1, np.int64), []
        for number, one in enumerate(self.codec.rounds):
            total = None
            for rank, (x, state) in enumerate(zip(gradients, self.states, strict=True)):
                out = np.zeros(one.payload_bytes(self.n), np.uint8)
                used = self.codec.encode_round(
                    number, x, table(self.n), out, at, sums,
                    workers=self.workers, state=state, seed=rank, step=step,
                )  # fmt: skip
                assert used.tolist() == [len(out)]
                mine = values(out, one.dtype)
                add = np.maximum if one.op == "max" else np.add
                total = mine if total is None else add(total, mine)
            sums.append((payload(total, one.dtype), at))
        results = [x.copy() for x in gradients]
        for rank, (x, state) in enumerate(zip(results, self.states, strict=True)):
            self.codec.decode_rounds(
                x, table(self.n), sums, workers=self.workers, state=state, seed=rank, step=step
            )
        assert all(np.array_equal(x.view(np.uint32), results[0].view(np.uint32)) for x in results)
        return results[0]
