"""Values that ranks must share have the same bits with all instructions and numbers of threads."""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from hipress.model.rounding import total

BITS = """
import hashlib, numpy as np, torch
from hipress.optim import Lion
from hipress.model.rounding import total
from hipress.engine.buckets import Differences

def draw(seed):
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(10001).astype("float32"))

def show(*tensors):
    for each in tensors:
        print(hashlib.sha256(each.detach().numpy().tobytes()).hexdigest())

bucket, mean, reference = draw(0), draw(1), draw(2)
state = {"mean": mean.numpy(), "reference": reference.numpy()}
Differences("diana", 0.1, 0, len(bucket), 0).add_mean(bucket, state)
show(bucket, mean)
parameter = torch.nn.Parameter(draw(3))
lion = Lion([parameter], lr=2**-10)
for seed in (4, 5):
    parameter.grad = draw(seed)
    lion.step()
show(parameter, lion.state[parameter]["exp_avg"])
print(total(draw(6).square()).hex())
"""


@pytest.mark.slow  # imports torch anew
def test_instructions_and_threads_change_no_bits():
    """torch's kernels round sums of products once with AVX2, and twice without."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("needs a CPU of whose instructions torch uses more than the default ones")
    with contextlib.redirect_stdout(io.StringIO()) as here:  # with all that this machine has
        exec(BITS, {})
    threads = "1" if torch.get_num_threads() > 1 else "2"
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": threads}
    found = subprocess.check_output([sys.executable, "-c", BITS], env=env, text=True).split()
    assert len(found) == 5
    assert here.getvalue().split() == found


def test_total():
    values = np.random.RandomState(0).standard_exponential(2_500_000).astype("float32")
    assert math.isclose(total(torch.from_numpy(values)), math.fsum(values.tolist()), rel_tol=1e-9)
    assert total(torch.zeros(3)) == total(torch.zeros(0)) == 0.0
    assert total(torch.tensor([1.0, math.inf])) == math.inf
    assert math.isnan(total(torch.tensor([1.0, math.nan])))
    assert total(torch.full((3,), 1e-40)) == 3 * float(torch.tensor(1e-40))
