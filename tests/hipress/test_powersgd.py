"""PowerSGD, compared with the formulas of PyTorch's hook."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize_gram_schmidt

import compll
from compll.numerics.matrices import random_matrix


class Hook:
    """The algorithm of powerSGD_hook for a matrix: warm start, error feedback, Gram-Schmidt."""

    def __init__(self, workers, shape, rank):
        self.errors = [torch.zeros(shape, dtype=torch.float64) for _ in range(workers)]
        self.q = torch.from_numpy(random_matrix(0, 0, shape[1], rank)).double()

    @staticmethod
    def orthogonalize(m):
        m = m.clone().unsqueeze(0)
        _orthogonalize_gram_schmidt(m)
        return m[0]

    def step(self, gradients):
        inputs = [g.double() + e for g, e in zip(gradients, self.errors, strict=True)]
        q = self.orthogonalize(self.q)
        p = self.orthogonalize(sum(m @ q for m in inputs))
        self.q = sum(m.T @ p for m in inputs) / len(inputs)
        out = p @ self.q.T
        self.errors = [m - out for m in inputs]
        return out


@pytest.mark.parametrize("workers, rank", [(2, 1), (3, 2), (4, 4)])
def test_equals_the_mathematics_of_pytorchs_hook(workers, rank):
    rows = cols = 40
    codec, n = compll.compile("powersgd", rank=rank), rows * cols
    hook = Hook(workers, (rows, cols), rank)
    states = [codec.init_state(n) for _ in range(workers)]
    table, at = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
    generator = torch.Generator().manual_seed(workers)
    for step in range(6):
        given = [torch.randn(rows, cols, generator=generator) for _ in range(workers)]
        flat = [g.reshape(-1).numpy().copy() for g in given]
        sums = []
        for number, one in enumerate(codec.rounds):
            outs = [np.zeros(one.payload_bytes(n), np.uint8) for _ in range(workers)]
            for x, out, state in zip(flat, outs, states, strict=True):
                codec.encode_round(
                    number, x, table, out, at, sums, workers=workers, state=state, step=step
                )
            total = sum(out.view(np.float32) for out in outs)
            sums.append((total.view(np.uint8), at))
        for x, state in zip(flat, states, strict=True):
            codec.decode_rounds(x, table, sums, workers=workers, state=state, step=step)
        theirs = hook.step(given).reshape(-1).numpy()
        assert np.linalg.norm(flat[0] - theirs) < 1e-4 * np.linalg.norm(theirs), step
        for state, error in zip(states, hook.errors, strict=True):
            assert np.allclose(state["residual"], error.reshape(-1), atol=1e-3)
