"""What bench.gpu times of rounds; the jobs are the same whatever memory a codec's arrays are in."""

import numpy as np
import pytest

import compll
from bench.gpu import round_jobs


@pytest.mark.parametrize("name", ["powersgd", "thc", "randomk", "onebit"])
def test_jobs_of_rounds(name, rng):
    codec, n = compll.compile(name), 5000
    x = rng.standard_normal(n).astype(np.float32)
    jobs = round_jobs(codec, x, codec.init_state(n))
    ends = ["decode_rounds"] if codec.rounds else []
    assert list(jobs) == [f"round_{one.name}" for one in codec.rounds] + ends
    for job, moved in jobs.values():
        job()
        assert moved >= 4


@pytest.fixture
def rng():
    return np.random.default_rng(1)
